"""The block kinds, one file per kind. A kind has the fields that a spec can set, and the lowering to graph nodes."""
