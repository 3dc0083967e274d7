"""Computes statistics of a model on calibration data: Hessians, gradient moments and input ranges."""
