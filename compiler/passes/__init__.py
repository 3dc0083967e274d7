"""Graph to graph, pure, verified after each."""
