"""Folders of Hugging Face Transformers: runs that start from them, and runs that are written as them."""
