"""One file an op family: type rule, cost, Torch spelling, float64 reference, derivative."""
