"""Matrix products in int8 for deployed models: the int8 form of each op, and the passes that rewrite graphs with these
forms."""
