"""Decoding from a cache."""
