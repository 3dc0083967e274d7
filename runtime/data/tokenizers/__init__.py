"""Tokenizers: bytes, SentencePiece, tiktoken, and single characters."""
