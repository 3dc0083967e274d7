"""Passes over the programs that append one token to each text."""
