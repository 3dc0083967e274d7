"""Programs over one parameter table, their cost, and two checks of generated modules: by torch.fx traces, and against
float64 references."""
