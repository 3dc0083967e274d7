"""How a model may adapt to the text that it is scored on: one file a method."""
