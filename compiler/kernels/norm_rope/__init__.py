"""Kernels of the norm, rotary embedding and gain of attention heads."""
