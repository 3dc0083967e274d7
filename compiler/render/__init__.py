"""Renders graphs as Python code, and templates as files."""
