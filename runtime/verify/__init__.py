"""Checks generated code against reference implementations."""
