"""Sweeps: many ordinary training runs of one spec, from one file, with a table and a picture of their results."""
