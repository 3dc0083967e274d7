"""Measures one spec on this machine, and compares the results with baselines.

Each module measures one part of the benchmark, and `suite` runs all parts.
"""
