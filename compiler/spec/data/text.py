"""Text as a stream of tokens, cut into windows as long as the context."""

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from specc.compiler.architectures.architecture import Form
from specc.compiler.spec.data.kind import DataKind, FileName
from specc.compiler.strict import NonNegative, Problem, StrictModel, later

# For each suffix of a tokenizer file: the settings that apply.
TOKENIZER_SETTINGS: Mapping[str, frozenset[str]] = {
    ".json": frozenset({"bos"}),
    ".model": frozenset(),
    ".tiktoken": frozenset({"pattern", "special", "bos"}),
}
KINDS = "`bytes`, tokenizer.json, a SentencePiece file (*.model) or a tiktoken rank file (*.tiktoken)"
TokenName = Annotated[str, Field(min_length=1, max_length=256)]
BYTE_IDS = 257  # the ids of the tokenizer `bytes`: 256 byte values and the mark between documents


class SpecialToken(StrictModel):
    """A special token of a tiktoken rank file.

    Attributes:
        token: the text of the token, such as `<|endoftext|>`.
        id: the id of the token. By default, the id after the previous special token, or after the last rank.
    """

    token: TokenName
    id: NonNegative | None = None


class TextData(DataKind):
    """Text as a stream of tokens.

    Attributes:
        tokenizer: `bytes`, a file `tokenizer.json` (or another name `*.json`), a SentencePiece file `*.model`, or a
            tiktoken rank file `*.tiktoken`.
        pattern: the pre-tokenizer of a tiktoken rank file, which splits text into pieces: `gpt2`, `gpt4`, `llama3`,
            `qwen`, `nanochat`, or a regular expression for a piece.
        special: the special tokens of a tiktoken rank file. By default, `<|endoftext|>`.
        bos: the special token before each document. By default, the first token of `special`, or the token that the
            tokenizer file states.
        order: the order of training windows. `sequential`: the order of the text. `coprime_stride`: with a stride that
            is coprime to the number of windows. `best_fit`: each row is packed with documents from their beginning, and
            only the last document of a row may be cut off.
    """

    gives: ClassVar[Form] = "text"
    usual: ClassVar[str] = "stdlib"
    untagged: ClassVar[bool] = True

    kind: Literal["text"] = "text"
    tokenizer: FileName = "bytes"
    pattern: Annotated[str, Field(min_length=1, max_length=2000)] = later("gpt2")
    special: tuple[SpecialToken, ...] = later(())
    bos: TokenName | None = later(None)
    order: Literal["sequential", "coprime_stride", "best_fit"] = "coprime_stride"

    @property
    def least_vocabulary(self) -> int:
        return BYTE_IDS if self.tokenizer == "bytes" else 0

    def problems(self) -> Iterator[Problem]:
        settings = TOKENIZER_SETTINGS.get(PurePath(self.tokenizer).suffix)
        if settings is None and self.tokenizer != "bytes":
            yield Problem(("tokenizer",), "S296", f"unknown tokenizer {self.tokenizer!r}", f"use {KINDS}")
            return
        for unused in sorted(self.model_fields_set & {"pattern", "special", "bos"} - (settings or frozenset())):
            message = f"`train.data.{unused}` does not apply to the tokenizer {self.tokenizer}"
            yield Problem((unused,), "S296", message, f"remove `{unused}`")

    def problems_with_reader(self, model: Any) -> Iterator[Problem]:
        if model.vocabulary < self.least_vocabulary:
            message = f"`vocab` is {model.vocabulary}, but the tokenizer `bytes` has {BYTE_IDS} ids"
            hint = f"use at least {BYTE_IDS}: one id per byte, and one that separates documents"
            yield Problem(("model", "vocab"), "S219", message, hint)
