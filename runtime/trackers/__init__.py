"""Trackers: programs that receive the log records of a run, such as TensorBoard. Each tracker is one file."""
