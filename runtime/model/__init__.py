"""Loads generated models: modules, parameters, and checks of their inputs."""
