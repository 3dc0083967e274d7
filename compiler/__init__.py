"""Compiles a declarative model spec into source code. Pure and quick: nothing here imports torch."""
