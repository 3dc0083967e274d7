"""Sweeps: training runs of one spec with various settings, from one file. A table and a picture show the results."""
