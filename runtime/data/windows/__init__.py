"""Windows of a token stream, for training and scoring."""
