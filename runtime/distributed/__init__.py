"""Training in several processes: launching them, collective calls, signals, and detecting hung processes."""
