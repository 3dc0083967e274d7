"""Kernels that compute the norm, the rotary embedding and the gain of attention heads."""
