"""Ops of pooled keys and values."""
