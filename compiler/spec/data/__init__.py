"""Kinds of training data, one file per kind."""
