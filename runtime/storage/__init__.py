"""Files that are whole or absent: runs, checkpoints, quantized runs."""
