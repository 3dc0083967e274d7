"""Quantization schemes, one file each: what is stored of a parameter, and how to get there and back."""
