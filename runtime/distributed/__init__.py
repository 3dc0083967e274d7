"""Several processes as one."""
