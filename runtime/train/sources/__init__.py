"""Readers of training data, one file per kind of `train.data`."""
