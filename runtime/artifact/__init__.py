"""The file format of artifacts (`.specc`): the header, the sections, the codecs, the table of arrays, and the stored
arrays.
"""
