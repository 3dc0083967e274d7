"""The model kinds. A model kind composes blocks into programs."""
