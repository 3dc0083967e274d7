"""Packs, downloads, checks and caches folders of token shards."""
