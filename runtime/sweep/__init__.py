"""Sweeps: many training runs of one spec, described by one file, with a table and a picture of their results."""
