"""Products deployed in int8: their forms, and the passes that make them."""
