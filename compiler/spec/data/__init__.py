"""What a run can train on: one file a kind of data."""
