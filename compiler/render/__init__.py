"""Graphs as Python, and templates as files."""
