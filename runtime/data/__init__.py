"""Reads training and evaluation data: documents, tokenizers, token shards, windows of tokens, and pairs of lines."""
