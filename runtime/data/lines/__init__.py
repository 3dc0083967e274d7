"""Pairs of lines."""
