"""Text of specs: guarded YAML, the place of every value, and overrides of it."""
