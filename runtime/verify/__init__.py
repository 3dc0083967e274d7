"""Generated code held to references."""
