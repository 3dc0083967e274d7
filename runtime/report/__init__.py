"""The report of a run: one HTML page that loads no other files."""
