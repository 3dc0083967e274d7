"""Kernels of matrix products with a pointwise epilogue."""
