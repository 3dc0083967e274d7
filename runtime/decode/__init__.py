"""Autoregressive decoding: text models decode texts from a KV cache, and encoder-decoder models decode target lines
from an encoder state.
"""
