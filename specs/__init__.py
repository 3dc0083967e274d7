"""The committed specs, which `specc init --from NAME` copies."""
