"""Functions that generated code calls: checks of operands, exact int8 products, and the compilation of CUDA sources."""
