"""Ops that write key-value caches, and attention over these caches."""
