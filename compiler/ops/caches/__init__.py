"""Ops of key-value caches: how they are written, and attention over them."""
