"""Reads documents from text sources."""
