"""The kernels that a plan can choose for a node. Each kernel file has a template of the same name."""
