"""Opens the tokenizer of a spec: a named tokenizer for text, or a character vocabulary for lines."""

from collections.abc import Sequence
from pathlib import Path

from specc.compiler.spec.data.text import TextData
from specc.compiler.spec.messages.expected import dotted
from specc.compiler.spec.spec import Spec
from specc.runtime.data.errors import DataError
from specc.runtime.data.tokenizers.characters import CharTokenizer
from specc.runtime.data.tokenizers.open import open_tokenizer
from specc.runtime.data.tokenizers.tokenizer import MAX_UINT16_VOCAB, Tokenizer, require_16_bits


def tokenizer_of(spec: Spec, search: Sequence[Path]) -> Tokenizer:
    """Returns the tokenizer that a text spec names.

    Raises DataError if the spec is not for text, its ids do not fit in the 16 bits of a token shard, the tokenizer is
    not found, its ids exceed the model's vocabulary or 16 bits, or its BOS id differs from the separator id that the
    spec states.
    """
    vocab = spec.model.vocabulary
    if vocab > MAX_UINT16_VOCAB:
        raise DataError(
            f"model.vocab of {spec.name} is {vocab:,}; token shards hold ids below {MAX_UINT16_VOCAB:,}",
            "such a spec can be planned, built, verified and loaded, but not trained or scored on text yet",
        )
    data = spec.train.data
    if not isinstance(data, TextData):
        raise DataError(f"{spec.name} has a vocabulary of characters, not a tokenizer")
    tokenizer = open_tokenizer(data.tokenizer, search)
    require_16_bits(tokenizer)
    if tokenizer.vocab > spec.model.vocabulary:
        raise DataError(
            f"{tokenizer.name} has {tokenizer.vocab:,} ids, but the model has only {spec.model.vocabulary:,}",
            f"set model.vocab to {tokenizer.vocab}, or use another tokenizer",
        )
    for path, mark in spec.model.marks:
        if mark != tokenizer.bos:  # else no document start would be detected, without an error
            written = "writes none" if tokenizer.bos is None else f"writes {tokenizer.bos}"
            message = f"{dotted(path)} is {mark}, but before each document {tokenizer.name} {written}"
            raise DataError(message, "use the id of the tokenizer, or leave it out")
    return tokenizer


def characters_of(spec: Spec) -> CharTokenizer:
    """Returns the character tokenizer of a spec of lines. Raises DataError for a text spec."""
    if spec.model.characters is None:
        raise DataError(f"{spec.name} is a text model and has no vocabulary of characters")
    return CharTokenizer(spec.model.characters)
