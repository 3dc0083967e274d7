"""Stores runs, checkpoints and quantized runs on disk. A file or directory is written completely or not at all."""
