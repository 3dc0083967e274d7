"""Training in several processes: their launch, collective calls, signals, and the detection of hung processes."""
