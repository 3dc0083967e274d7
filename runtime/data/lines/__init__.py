"""Pairs of source and target lines, from files and from tasks that generate lines, and their loaders."""
