"""Measurements of one spec on this machine, compared with baselines. Each file measures one thing. `suite` runs them
all.
"""
