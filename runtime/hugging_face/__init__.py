"""Imports folders of Hugging Face Transformers as runs, and exports runs as such folders."""
