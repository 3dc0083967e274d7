"""Operations of decoding steps. A pass replaces several other operations with one of these."""
