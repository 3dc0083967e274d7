"""One file a fusion: what it takes of a fusion point's members, and the larger ops that it makes of them."""
