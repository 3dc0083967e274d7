"""Trains a generated model: the steps, the state of a run, and resuming."""
