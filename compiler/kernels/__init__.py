"""One file a kernel, paired by name with its template."""
