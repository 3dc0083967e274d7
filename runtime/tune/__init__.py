"""The search for the fastest kernel and tile sizes of every node of a plan, on this machine."""
