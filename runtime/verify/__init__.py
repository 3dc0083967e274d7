"""Verifies generated code against reference implementations."""
