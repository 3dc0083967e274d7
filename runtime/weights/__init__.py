"""Weights that a run starts from: readers of their formats, and the copy into the parameters of a model."""
