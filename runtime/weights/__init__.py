"""Weights with which a run starts: readers for each format, and the copy into the parameters of a model."""
