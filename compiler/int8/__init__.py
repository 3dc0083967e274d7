"""Products deployed in int8: the int8 form of each op, and the passes that rewrite graphs with these forms."""
