"""Training of a generated model: the loop over steps, the state of a run, and the resuming of runs."""
