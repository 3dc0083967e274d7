"""Quantization schemes, one module each. A scheme states which arrays are stored for a parameter, and how to quantize
and dequantize it."""
