"""Runs, checkpoints and quantized runs on disk. Every file or directory is written completely or not at all."""
