"""Programs over one parameter table: their cost, float64 references, and the fx witness."""
