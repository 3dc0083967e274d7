"""The comparison of two specs: their differences, and the changes that break old checkpoints and artifacts."""
