"""The model kinds: each composes blocks into programs."""
