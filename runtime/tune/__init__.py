"""The search for the fastest kernel and tile of every node of a plan, on this machine."""
