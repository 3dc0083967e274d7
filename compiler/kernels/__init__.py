"""Kernels that a plan can choose for a node. Each has a template of the same name, which it renders."""
