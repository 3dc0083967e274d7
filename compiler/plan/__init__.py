"""Which kernel computes what, and the lock of what was measured."""
