"""Side-by-side measurements of one spec on the machine at hand. One idea a file; `suite` runs them in order."""
