"""The choice of a kernel for each node, and the lock file of measured kernels."""
