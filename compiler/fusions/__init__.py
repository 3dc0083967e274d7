"""Fusions that are more than a pointwise epilogue, one file per fusion. A fusion replaces several members of a fusion
point by one op."""
