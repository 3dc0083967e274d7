"""Tokenizers: bytes, SentencePiece, tiktoken, `tokenizer.json`, and single characters."""
