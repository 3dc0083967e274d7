"""Pairs of source and target lines: files, generated tasks, and loaders."""
