"""Folders of token shards: packing, fetching, checking and caching."""
