"""Captures Hessians, allocates bits and quantizes the parameters of a trained model."""
