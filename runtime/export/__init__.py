"""Writes what leaves a run: the .specc artifact and safetensors files."""
