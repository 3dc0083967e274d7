"""Reports about a plan: PLAN.md, the summary, and the output of `specc explain`."""
