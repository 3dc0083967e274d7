"""What generated code imports."""
