"""Error messages for invalid specs, in terms of the spec's keys and values."""
