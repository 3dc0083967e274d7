"""Reads windows of token streams, for training and scoring."""
