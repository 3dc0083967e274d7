"""Kernels that compute softmax cross-entropy and its gradient."""
