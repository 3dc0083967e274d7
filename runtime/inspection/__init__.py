"""What `specc inspect` measures in a trained model: ranks, heads, units, norms, and sensitivity to quantization."""
