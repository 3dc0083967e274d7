"""Families of published decoders, one file per family. A family converts between config.json and specs, and names
tensors.
"""
