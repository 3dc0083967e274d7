"""The parts of `specc inspect`: ranks, attention heads, inner features, norms, experts, and sensitivity to
quantization.
"""
