"""Bits per byte, exact match, and validation while training."""
