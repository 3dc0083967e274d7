"""Imports model folders of Hugging Face Transformers as runs, and exports runs as model folders of Transformers."""
