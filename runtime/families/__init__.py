"""Families of published decoders, one file per family.

A family converts between config.json and specs, and maps the parameters of specc to the tensors of weight files.
"""
