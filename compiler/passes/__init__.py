"""Passes over programs. Each is a pure function from programs to programs; programs are verified after every pass."""
