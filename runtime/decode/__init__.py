"""Autoregressive decoding of text from a KV cache, and of lines from an encoder state."""
