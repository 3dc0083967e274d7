"""The text of specs: a safe YAML subset, the location of every value, and overrides of values."""
