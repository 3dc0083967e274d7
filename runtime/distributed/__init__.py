"""Training in several processes: launch, collective calls, signals and the detection of hung processes."""
