"""Scores of a run or an artifact."""
