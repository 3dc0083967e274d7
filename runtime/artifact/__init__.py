"""The file format of artifacts, `.specc`: header, sections, codecs, the table of arrays, and stored tensors."""
