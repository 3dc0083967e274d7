"""Methods by which a model adapts to the text that it scores: one file per kind of `eval.adapt`."""
