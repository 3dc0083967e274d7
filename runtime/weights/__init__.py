"""The weights from which a run starts: readers for each format, and the copy into a model."""
