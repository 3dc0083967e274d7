"""Families of published decoders: one file each, with its config as a spec and the names of its tensors."""
