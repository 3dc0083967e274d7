"""The operations of the graph, one module per family: type rule, cost, Torch expression, float64 reference,
derivative."""
