"""Support library of generated code: operand checks, exact int8 sums and compilation of CUDA sources."""
