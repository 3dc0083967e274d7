"""The kinds of tasks of `specc eval --task`, each in a module: multiple choice, cloze, and perplexity of text."""
