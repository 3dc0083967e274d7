"""Methods that adapt a model to the text on which it is evaluated, one file per method."""
