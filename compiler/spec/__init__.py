"""The Pydantic models of a spec, and the checks of specs."""
