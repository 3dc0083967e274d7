"""Operations of decoding steps. A pass replaces several other operations by one operation of this package."""
