"""Kernels of softmax cross-entropy and its gradient."""
