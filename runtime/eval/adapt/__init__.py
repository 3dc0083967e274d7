"""Models that adapt to the text that they are scored on: one file a method of `eval.adapt`."""
