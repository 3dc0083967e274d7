"""Kernels of int8 products and of steps of int8 LSTMs."""
