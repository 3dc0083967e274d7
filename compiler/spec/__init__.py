"""The models of a spec, and its checks."""
