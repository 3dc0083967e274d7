"""Quantization schemes, one module each. A scheme states the stored arrays of a parameter, and how to quantize and
dequantize the parameter."""
