"""Functions that generated code calls: operand checks, exact int8 sums, and compilation of CUDA sources."""
