"""The measurements of `specc inspect`.

They are the ranks of matrices, attention heads, inner features, norms of the residual stream, loads of experts, and the
sensitivity to quantization.
"""
