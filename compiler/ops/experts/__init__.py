"""Operations of a mixture of experts."""
