"""Errors of a spec in its own terms."""
