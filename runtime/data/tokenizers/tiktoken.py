"""The tokenizer for tiktoken rank files, `*.tiktoken`, with the pre-tokenizer of GPT-2."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from specc.runtime.data.errors import DataError
from specc.runtime.data.tokenizers.tokenizer import PieceBytes, TokenArray, Tokenizer, cores, id_dtype, read_file

# GPT-2's pre-tokenizer. Possessive quantifiers match the same pieces as greedy quantifiers, without backtracking.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
GPT2_SEPARATOR = "<|endoftext|>"

# `\s+(?!\S)` backtracks by recursion and overflows the regex engine's stack near a million characters, so long runs are
# cut out first. The character class is Unicode White_Space, which `\s` means in that engine, but not in `re`.
_WHITE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_LONG_BLANK = re.compile(f"[{_WHITE}]{{2000,}}")
# Invalid UTF-8 bytes, as represented by the "surrogateescape" handler.
_ESCAPED = re.compile("([\udc80-\udcff]+)")


class TiktokenTokenizer(Tokenizer):
    """A tokenizer from a `.tiktoken` rank file (lines of base64 bytes and rank) with the pattern of GPT-2.

    It is lossless on any bytes. `<|endoftext|>`, which separates documents, has the id after the last rank; within a
    document it is ordinary text. Invalid UTF-8 bytes become one token each.

    Raises DataError if the file is invalid or tiktoken is not installed.
    """

    lossless = True

    def __init__(self, path: str | Path) -> None:
        try:
            from tiktoken import Encoding
        except ImportError:
            raise DataError(f"{path}: tiktoken is not installed", "pip install tiktoken") from None
        # tiktoken's own loader caches local files in a temporary folder by path, so it would miss changes of a file.
        data = read_file(Path(path))
        ranks = _parse_ranks(data, Path(path))
        self.name = Path(path).name
        self.vocab = len(ranks) + 1
        self.bos = len(ranks)
        self._pieces = sorted(ranks, key=ranks.__getitem__)
        self._byte_ids: TokenArray = np.array([ranks[bytes([value])] for value in range(256)], id_dtype(self.vocab))
        self._encoding = Encoding(
            self.name,
            pat_str=GPT2_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={GPT2_SEPARATOR: len(ranks)},
            explicit_n_vocab=self.vocab,
        )
        self._digest = hashlib.sha256(b"tiktoken\0" + GPT2_PATTERN.encode() + b"\0" + data).hexdigest()

    def encode(self, text: bytes) -> TokenArray:
        string = text.decode("utf-8", errors="surrogateescape")
        parts: list[TokenArray] = []
        for index, part in enumerate(_ESCAPED.split(string)):
            if index % 2:
                raw = np.frombuffer(part.encode("utf-8", errors="surrogateescape"), np.uint8)
                parts.append(self._byte_ids[raw])
            else:
                parts.extend(self._encode_valid(segment) for segment in _segments(part))
        return np.concatenate([np.zeros(0, self._byte_ids.dtype), *parts])

    def _encode_valid(self, text: str) -> TokenArray:
        ids = self._encoding.encode_to_numpy(text, disallowed_special=())
        return ids.astype(self._byte_ids.dtype)

    def encode_batch(self, texts: Sequence[bytes]) -> list[TokenArray]:
        with ThreadPoolExecutor(cores()) as pool:  # the encoder releases the GIL
            return list(pool.map(self.encode, texts))

    def decode(self, ids: Sequence[int] | TokenArray) -> bytes:
        return b"".join(self._pieces[i] for i in self.checked(ids).tolist() if i != self.bos)

    def piece_bytes(self) -> PieceBytes:
        base = np.array([len(piece) for piece in self._pieces] + [0], np.int64)
        return PieceBytes(base, np.zeros(self.vocab, np.bool_), np.arange(self.vocab) == self.bos)


def _segments(text: str) -> list[str]:
    """Cuts `text` around long runs of white space, at positions where the pattern of GPT-2 always cuts.

    If a word follows such a run, the run without its last character is a piece of its own.
    """
    cuts = [0]
    for match in _LONG_BLANK.finditer(text):
        if match.end() < len(text):  # a run at the end matches without backtracking
            cuts += [match.start(), match.end() - 1]
    return [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True) if a < b]


def _parse_ranks(data: bytes, path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            piece = base64.b64decode(encoded, validate=True)
            if int(rank) != len(ranks) or piece in ranks or not piece:
                raise ValueError
        except (ValueError, binascii.Error):
            raise DataError(
                f"{path}:{number}: expected base64 bytes not seen before and the rank {len(ranks)}",
                "a .tiktoken file has one token a line, ranks counting up from 0",
            ) from None
        ranks[piece] = len(ranks)
    missing = sum(bytes([value]) not in ranks for value in range(256))
    if missing:
        raise DataError(
            f"{path}: {missing} of the 256 single bytes have no rank", "the file is cut, or not a byte-level vocabulary"
        )
    return ranks
