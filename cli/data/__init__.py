"""Commands for token shards, which pack, check and download them."""
