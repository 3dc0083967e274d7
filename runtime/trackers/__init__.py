"""Trackers: programs that receive the records of a run's log besides log.jsonl. One file per tracker."""
