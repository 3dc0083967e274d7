"""Windows of token streams, for training and scoring."""
