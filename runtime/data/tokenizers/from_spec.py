"""The tokenizer of a spec: one that it names, or the characters that it states."""

from collections.abc import Sequence
from pathlib import Path

from specc.compiler.spec.data.text import TextData
from specc.compiler.spec.messages.expected import dotted
from specc.compiler.spec.spec import Spec
from specc.runtime.data.errors import DataError
from specc.runtime.data.tokenizers.characters import CharTokenizer
from specc.runtime.data.tokenizers.open import open_tokenizer
from specc.runtime.data.tokenizers.tokenizer import Tokenizer, require_16_bits


def tokenizer_of(spec: Spec, search: Sequence[Path]) -> Tokenizer:
    """The tokenizer that a spec of text names. Raises DataError where it is not found, has more ids than the model or
    than token shards hold, or writes another mark before documents than the spec states."""
    data = spec.train.data
    if not isinstance(data, TextData):
        raise DataError(f"{spec.name} has a vocabulary of characters, and no tokenizer")
    tokenizer = open_tokenizer(data.tokenizer, search)
    require_16_bits(tokenizer)
    if tokenizer.vocab > spec.model.vocabulary:
        raise DataError(
            f"{tokenizer.name} has {tokenizer.vocab:,} ids, the model only {spec.model.vocabulary:,}",
            f"set model.vocab to {tokenizer.vocab}, or use another tokenizer",
        )
    for path, mark in spec.model.marks:
        if mark != tokenizer.bos:  # else documents would never begin, and nothing would tell
            written = "writes none" if tokenizer.bos is None else f"writes {tokenizer.bos}"
            message = f"{dotted(path)} is {mark}, and before each document {tokenizer.name} {written}"
            raise DataError(message, "name the tokenizer's own mark, or leave it out")
    return tokenizer


def characters_of(spec: Spec) -> CharTokenizer:
    """The characters that a spec of lines states. Raises DataError for a spec of text."""
    if spec.model.characters is None:
        raise DataError(f"{spec.name} reads one stream of tokens, and has no vocabulary of characters")
    return CharTokenizer(spec.model.characters)
