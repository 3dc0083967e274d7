"""Passes over programs. Each pass is a pure function from programs to programs. The compiler verifies the programs
after every pass."""
