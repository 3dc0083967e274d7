"""The block kinds, one file per kind: the fields that a spec can set, and the lowering."""
