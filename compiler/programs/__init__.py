"""Programs over one parameter table, their cost, and two checks of generated modules: torch.fx traces and float64
references."""
