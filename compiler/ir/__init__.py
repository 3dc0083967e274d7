"""The typed graph, its builder, and its text form."""
