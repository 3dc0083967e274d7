"""Sweeps: training runs of one spec with various settings, which one file lists. A table and a picture show the
results.
"""
