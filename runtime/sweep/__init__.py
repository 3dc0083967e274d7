"""Sweeps: training runs of one spec with various settings, from one file. Makes a table and a picture of the
results.
"""
