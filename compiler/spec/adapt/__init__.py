"""Methods that adapt a model to the text it is evaluated on, one file per method."""
