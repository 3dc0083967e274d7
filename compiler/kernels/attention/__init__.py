"""Kernels of attention and the gradient of attention."""
