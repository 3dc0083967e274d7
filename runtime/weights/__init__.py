"""Weights that a run starts from: the formats that they are read from, and how they are fitted to a model."""
