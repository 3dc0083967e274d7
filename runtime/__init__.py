"""Trains, quantizes, evaluates and exports what the compiler generated."""
