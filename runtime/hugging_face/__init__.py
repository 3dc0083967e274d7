"""Folders of Hugging Face Transformers: imports them as runs, and exports runs as such folders."""
