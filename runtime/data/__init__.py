"""Documents, tokenizers, token shards, windows of them, and pairs of lines."""
