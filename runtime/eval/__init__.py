"""Evaluates a run or an artifact: bits per byte, exact match, tasks, and test-time adaptation."""
