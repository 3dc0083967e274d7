"""What a spec may say, and how it is checked."""
