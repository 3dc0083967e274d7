"""Trackers: programs that receive the records of a run's log in addition to log.jsonl. Each tracker is one file."""
