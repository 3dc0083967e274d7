"""Reading of documents from text sources."""
