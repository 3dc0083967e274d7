"""The model kinds. Each composes blocks into programs."""
