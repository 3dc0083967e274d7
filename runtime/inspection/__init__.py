"""The measurements of `specc inspect`: ranks, heads, units, norms, and sensitivity to quantization."""
