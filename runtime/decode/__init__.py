"""Autoregressive decoding: of text from a KV cache, and of target lines from an encoder state."""
