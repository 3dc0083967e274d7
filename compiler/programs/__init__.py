"""The programs of a model, which share one parameter table, and the cost of programs. The package also contains two
checks of generated modules: one against torch.fx traces, and one against float64 references."""
