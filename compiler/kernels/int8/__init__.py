"""Kernels of int8 products and of single steps of int8 LSTMs."""
