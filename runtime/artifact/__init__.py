"""The `.specc` artifact format: header, sections, codecs, the table of arrays and stored tensors."""
