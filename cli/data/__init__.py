"""Commands that pack, check and download token shards, and train tokenizers."""
