"""Entries of `train.optimizers`, one file per kind of optimizer."""
