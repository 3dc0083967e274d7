"""Evaluation of a run or an artifact."""
