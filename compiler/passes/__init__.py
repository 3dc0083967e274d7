"""Passes over programs. Each is a pure function from programs to programs. Programs are verified after every pass."""
