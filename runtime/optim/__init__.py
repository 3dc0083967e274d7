"""Learning-rate schedules, Muon and AdamW by name pattern, f32 master weights, and weight averages."""
