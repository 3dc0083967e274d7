"""Families of published decoders, one file per family: the conversions between configs and specs, and the names of
tensors."""
