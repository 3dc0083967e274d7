"""Searches for the fastest kernel and tile sizes of every node of a plan, by measurements on this machine."""
