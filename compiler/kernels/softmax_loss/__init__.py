"""Kernels of the cross-entropy of a softmax."""
