"""One file a block kind: what a spec may say of it, and how it lowers."""
