"""Tasks of `specc eval --task`, one file per kind: multiple choice, cloze, and perplexity of text."""
