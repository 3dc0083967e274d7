"""Compares groups of runs for `specc compare`: statistics over seeds, loss curves, and the calibration of
probabilities.
"""
