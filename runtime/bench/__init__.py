"""Measures one spec on this machine, and compares the results with baselines. Each module measures one part, and
`suite` runs all parts.
"""
