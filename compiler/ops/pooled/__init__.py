"""Ops of pooled keys and values: one key and value for a block of tokens."""
