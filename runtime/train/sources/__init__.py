"""Readers of training data, with one file per kind of data in `train.data`."""
