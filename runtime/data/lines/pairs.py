"""Pairs of source and target lines as tokens."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from specc.runtime.data.tokenizers.characters import PAD, SPECIAL, CharTokenizer, Codes, Tokens

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Ints = npt.NDArray[np.int64]


class TextPairs(Protocol):
    """N pairs of lines as text."""

    def sides(self) -> tuple[Codes, Codes]:
        """Returns the sources and the targets as code points, [N, W] each, with zeros after the end of each line."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """N line pairs as tokens. `source` and `target` are u8 [N, width]. Each row has one token per character, then a
    stop token, then padding.
    """

    source: Tokens
    target: Tokens

    @classmethod
    def of(cls, lines: TextPairs, tokenizer: CharTokenizer, width: int) -> "Pairs":
        """Encodes line pairs as tokens, in rows of `width` tokens.

        Raises LineError if a line has `width` or more characters, or a character that is not in the vocabulary.
        """
        source, target = (tokenizer.encode_codes(side, width) for side in lines.sides())
        return cls(source, target)

    @classmethod
    def random(cls, count: int, tokenizer: CharTokenizer, width: int) -> "Pairs":
        """Returns `count` pairs of random characters. The lines are as long as rows of `width` tokens permit."""
        tokens = np.random.default_rng(0).integers(SPECIAL, tokenizer.vocab, (2, count, width), np.uint8)
        tokens[..., -1] = tokenizer.stop
        return cls(*tokens)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, rows: slice | Ints) -> "Pairs":
        return Pairs(self.source[rows], self.target[rows])

    def within(self, tokens: int | None) -> "Pairs":
        """Returns the longest prefix of the pairs with at most `tokens` target tokens in total, including stop tokens.

        The result has at least one pair. If `tokens` is None, the result has all pairs.
        """
        if tokens is None:
            return self
        count = int(np.searchsorted(lengths(self.target).cumsum(), tokens, side="right"))
        return self[: max(count, 1)]

    @property
    def digest(self) -> str:
        digest = hashlib.sha256(np.ascontiguousarray(self.source).data)
        digest.update(np.ascontiguousarray(self.target).data)
        return digest.hexdigest()


def lengths(tokens: Tokens) -> Ints:
    """Returns the number of tokens of each row of `tokens`, without padding, i64 [N]."""
    counts: Ints = (tokens != PAD).sum(axis=1, dtype=np.int64)
    return counts


def placed(array: npt.NDArray[np.generic], device: "torch.device") -> "Tensor":
    """Copies an array to `device`. The copy to a GPU is asynchronous."""
    import torch

    tensor = torch.from_numpy(np.asarray(array, order="C"))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
