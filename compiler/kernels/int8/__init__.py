"""Kernels for int8 matrix products, and for one time step of an int8 LSTM."""
