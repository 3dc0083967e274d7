"""Terms of the training loss, one file per kind."""
