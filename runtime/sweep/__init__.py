"""Sweeps: training runs of one spec with various settings. A sweep file lists the settings. A table and a picture show
the results.
"""
