"""The weights from which a run starts: reads weights of each format, and copies them into a model."""
