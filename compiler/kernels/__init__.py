"""The kernels that a plan can choose for a node. Each kernel renders the template of the same name."""
