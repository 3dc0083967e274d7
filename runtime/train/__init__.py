"""Trains a generated model: performs training steps, saves the state of a run, and resumes runs."""
