"""Metrics: bits per byte, exact match, and validation during training."""
