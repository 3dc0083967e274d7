"""Opens the tokenizer of a spec: the named tokenizer of a text model, or the character tokenizer of a model that maps
lines to lines.
"""

from collections.abc import Sequence
from pathlib import Path

from specc.compiler.spec.data.text import TextData
from specc.compiler.spec.messages.expected import dotted
from specc.compiler.spec.spec import Spec
from specc.runtime.data.errors import DataError
from specc.runtime.data.tokenizers.characters import CharTokenizer
from specc.runtime.data.tokenizers.open import open_tokenizer
from specc.runtime.data.tokenizers.tokenizer import Tokenizer


def tokenizer_of(spec: Spec, search: Sequence[Path]) -> Tokenizer:
    """Returns the tokenizer that a text spec names.

    `search` has the folders to search for the tokenizer file. Raises DataError if the spec does not describe a text
    model, the tokenizer is not found, or the tokenizer does not match the vocabulary of the model.
    """
    data = spec.train.data
    if not isinstance(data, TextData):
        raise DataError(f"{spec.name} has a vocabulary of characters, not a tokenizer")
    tokenizer = open_tokenizer(data, search)
    if tokenizer.vocab > spec.model.vocabulary:
        raise DataError(
            f"{tokenizer.name} has {tokenizer.vocab:,} ids, but the model has only {spec.model.vocabulary:,}",
            f"set model.vocab to {tokenizer.vocab}, or use another tokenizer",
        )
    for path, mark in spec.model.marks:
        if mark != tokenizer.bos:  # otherwise, document starts would silently remain undetected
            written = "writes none" if tokenizer.bos is None else f"writes {tokenizer.bos}"
            message = f"{dotted(path)} is {mark}, but {tokenizer.name} {written} before each document"
            raise DataError(message, f"set {dotted(path)} to the id that the tokenizer writes, or remove the key")
    return tokenizer


def characters_of(spec: Spec) -> CharTokenizer:
    """Returns the character tokenizer of a spec. Raises DataError if the spec describes a text model."""
    if spec.model.characters is None:
        raise DataError(f"{spec.name} is a text model and has no vocabulary of characters")
    return CharTokenizer(spec.model.characters)
