"""The `.specc` file: sections, codecs, tables, stored tensors."""
