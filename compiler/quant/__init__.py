"""Quantization schemes, one module each: the arrays stored for a parameter, and the conversions in both directions."""
