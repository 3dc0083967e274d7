"""Programs over one parameter table, their cost, and two checks of generated modules: by torch.fx traces, and by
float64 references."""
