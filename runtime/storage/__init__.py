"""Storage of runs, checkpoints and quantized runs. A file or directory is written completely or not at all."""
