"""The support library of generated code: operand checks, exact int8 sums, and the compilation of CUDA sources."""
