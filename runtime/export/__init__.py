"""Exports runs in several formats, and reports the sizes of artifacts."""
