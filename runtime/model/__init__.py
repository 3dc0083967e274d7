"""A generated model in memory."""
