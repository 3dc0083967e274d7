"""Kernels of matrix products with an epilogue."""
