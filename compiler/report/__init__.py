"""PLAN.md, the summary, and what `explain` prints."""
