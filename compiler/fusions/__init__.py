"""Fusions that are more than a pointwise epilogue, one file per fusion: each rewrites members of a fusion point to ops
that cover several of them."""
