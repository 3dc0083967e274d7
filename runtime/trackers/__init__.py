"""Trackers: programs such as TensorBoard that receive the log records of a run. Each tracker has one file here."""
