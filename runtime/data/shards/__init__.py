"""Folders of token shards: packing, fetching, checking."""
