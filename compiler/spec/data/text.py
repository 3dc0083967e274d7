"""Text as a stream of tokens, cut into windows as long as the context."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from specc.compiler.architectures.architecture import Form
from specc.compiler.spec.data.kind import DataKind, FileName
from specc.compiler.strict import Problem

BYTE_IDS = 257  # of the tokenizer `bytes`: 256 byte values and the mark between documents


class TextData(DataKind):
    """Text as a stream of tokens.

    Attributes:
        tokenizer: `bytes`, a SentencePiece file `*.model`, or a tiktoken rank file.
        order: the order of training windows: as in the text, or by a stride that is coprime to their number.
    """

    gives: ClassVar[Form] = "text"
    usual: ClassVar[str] = "stdlib"
    untagged: ClassVar[bool] = True

    kind: Literal["text"] = "text"
    tokenizer: FileName = "bytes"
    order: Literal["sequential", "coprime_stride"] = "coprime_stride"

    @property
    def least_vocabulary(self) -> int:
        return BYTE_IDS if self.tokenizer == "bytes" else 0

    def problems_with(self, model: Any) -> Iterator[Problem]:
        """Yields a problem if the model reads lines, or lacks ids of the tokenizer `bytes`."""
        if model.reads != self.gives:
            message = "`text` gives one stream of tokens, but the model translates lines"
            yield Problem(("train", "data"), "S222", message, "e.g. `data: {kind: polynomial}`")
        elif model.vocabulary < self.least_vocabulary:
            message = f"vocab is {model.vocabulary}, but the tokenizer `bytes` has {BYTE_IDS} ids"
            hint = f"use at least {BYTE_IDS}: one id per byte, and one that separates documents"
            yield Problem(("model", "vocab"), "S219", message, hint)
