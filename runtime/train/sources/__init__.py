"""Training data at work: one file a kind of `train.data`."""
