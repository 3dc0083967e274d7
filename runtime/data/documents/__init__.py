"""Documents of text sources."""
