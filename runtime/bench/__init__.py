"""Side-by-side measurements of one spec on this machine. Each file is one measurement; `suite` runs them in order."""
