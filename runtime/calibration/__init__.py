"""What a model computes on calibration data: Hessians, lookups, ranges."""
