"""Kernels of attention."""
