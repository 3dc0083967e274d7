"""The report of a run: a single HTML page that loads no other files."""
