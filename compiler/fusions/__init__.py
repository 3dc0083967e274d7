"""Fusions that are more than a pointwise epilogue, one file per fusion. A fusion point of a spec lists the nodes to
fuse, which are called its members. A fusion replaces several members by one op."""
