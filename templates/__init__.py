"""Source files with holes: the text of every generated file starts here."""
