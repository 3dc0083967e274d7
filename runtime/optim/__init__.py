"""Optimizers, learning-rate schedules, master weights and weight averages."""
