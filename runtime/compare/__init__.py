"""Comparisons of groups of runs: statistics over seeds, curves, calibration and texts."""
