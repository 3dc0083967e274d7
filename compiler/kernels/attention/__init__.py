"""Kernels of attention and its gradient."""
