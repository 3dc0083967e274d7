"""Operations of decoding steps, which a pass puts in the place of several others."""
