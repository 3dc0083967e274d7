"""The programs of a model, which share one parameter table, and the cost of programs. Also two checks of generated
modules: against torch.fx traces, and against float64 references."""
