"""Exports runs as .specc artifacts or safetensors files, and reports artifact sizes."""
