"""What `train.optimizers` may list: one file per kind of optimizer."""
