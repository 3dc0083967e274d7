"""Kernels of norm, rotary embedding and gain of a head."""
