"""Quantizes a trained model: measures Hessians, chooses the bits of each parameter, and quantizes the parameters."""
