"""Quantizes a trained model: captures Hessians, allocates bits, quantizes parameters."""
