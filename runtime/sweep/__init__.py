"""Sweeps: many training runs of one spec, which one file describes, with a table and a picture of their results."""
