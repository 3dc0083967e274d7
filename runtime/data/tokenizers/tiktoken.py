"""The tokenizer for tiktoken rank files, `*.tiktoken`."""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from specc.runtime.data.errors import DataError
from specc.runtime.data.tokenizers.files import cores, id_dtype, missing_package, read_file
from specc.runtime.data.tokenizers.patterns import PATTERNS
from specc.runtime.data.tokenizers.tokenizer import PieceBytes, TokenArray, Tokenizer

SEPARATOR = "<|endoftext|>"
# In characters. Longer runs of white space overflow the stack of the regex engine.
_MOST_BLANK = re.compile(r"\s{500000}")
# Invalid UTF-8 bytes, as the error handler "surrogateescape" represents them.
_ESCAPED = re.compile("([\udc80-\udcff]+)")


class TiktokenTokenizer(Tokenizer):
    """A tokenizer from a `.tiktoken` rank file. Each line has a token in base64, and its rank.

    The tokenizer is lossless for any bytes. It treats special tokens in a document as ordinary text. Each invalid UTF-8
    byte becomes one token.

    Args:
        path: the rank file.
        pattern: the pre-tokenizer: a name in PATTERNS, or a regular expression whose matches are the pieces. The
            matches must cover the whole text.
        special: the special tokens and their ids. None selects `<|endoftext|>`, with the id after the last rank.
        bos: the special token that precedes each document. None selects the first special token.

    Raises:
        DataError: if the file is invalid, the pattern is not a valid regular expression, or two tokens have the same
            id.
        EnvironmentFailure: if tiktoken is not installed.
    """

    lossless = True

    def __init__(
        self,
        path: str | Path,
        pattern: str = "gpt2",
        special: Mapping[str, int | None] | None = None,
        bos: str | None = None,
    ) -> None:
        try:
            from tiktoken import Encoding
        except ImportError:
            raise missing_package(path, "tiktoken") from None
        # The loader of tiktoken caches local files by path in a temporary folder, so that it would miss changes to a
        # file.
        data = read_file(Path(path))
        ranks = parse_ranks(data, Path(path))
        self.name = Path(path).name
        specials = _numbered(special or {SEPARATOR: None}, ranks, Path(path))
        bos = next(iter(specials)) if bos is None else bos
        if bos not in specials:
            message = f"{path}: BOS is {bos}, but the special tokens are {', '.join(specials)}"
            raise DataError(message, "add the token to `special` in train.data of the spec")
        self.bos = specials[bos]
        self.vocab = max(len(ranks), *(identity + 1 for identity in specials.values()))
        unused = range(len(ranks), self.vocab)
        self._pieces = [*sorted(ranks, key=ranks.__getitem__), *(b"" for _ in unused)]
        self._sizes = np.array([len(piece) for piece in self._pieces], np.int64)
        self._byte_ids: TokenArray = np.array([ranks[bytes([value])] for value in range(256)], id_dtype(self.vocab))
        self._pattern = PATTERNS.get(pattern)
        regex = pattern if self._pattern is None else self._pattern.regex
        try:
            self._encoding = Encoding(self.name, pat_str=regex, mergeable_ranks=ranks, special_tokens=specials)
        except ValueError as error:
            known = f"use one of {', '.join(PATTERNS)}, or a regular expression of the engine of tiktoken"
            raise DataError(f"{path}: the pattern {pattern!r} is not valid: {error}", known) from None
        marks = "" if specials == {SEPARATOR: len(ranks)} else json.dumps([specials, self.bos])
        self._digest = hashlib.sha256(b"tiktoken\0" + regex.encode() + b"\0" + data + marks.encode()).hexdigest()

    def encode(self, text: bytes) -> TokenArray:
        string = text.decode("utf-8", errors="surrogateescape")
        parts: list[TokenArray] = []
        for index, part in enumerate(_ESCAPED.split(string)):
            if index % 2:
                raw = np.frombuffer(part.encode("utf-8", errors="surrogateescape"), np.uint8)
                parts.append(self._byte_ids[raw])
            else:
                parts.extend(self._encode_valid(segment) for segment in self._segments(part))
        ids = np.concatenate([np.zeros(0, self._byte_ids.dtype), *parts])
        if self._pattern is None and self._sizes[ids].sum() != len(text):
            message = f"{self.name}: the pattern leaves out parts of a document"
            raise DataError(message, r"a pattern must match all text: end it with `|\s+|.`")
        return ids

    def _segments(self, text: str) -> list[str]:
        if self._pattern is not None:
            return self._pattern.segments(text)
        if blank := _MOST_BLANK.search(text):
            message = f"{self.name}: more than 500,000 blank characters in a row, at character {blank.start():,}"
            raise DataError(message, "remove the blanks, or use a pattern of specc by name")
        return [text]

    def _encode_valid(self, text: str) -> TokenArray:
        ids = self._encoding.encode_to_numpy(text, disallowed_special=())
        return ids.astype(self._byte_ids.dtype)

    def encode_batch(self, texts: Sequence[bytes]) -> list[TokenArray]:
        with ThreadPoolExecutor(cores()) as pool:  # threads run in parallel, because the encoder releases the GIL
            return list(pool.map(self.encode, texts))

    def decode(self, ids: Sequence[int] | TokenArray) -> bytes:
        return b"".join(self._pieces[i] for i in self.checked(ids).tolist())

    def piece_bytes(self) -> PieceBytes:
        return PieceBytes(self._sizes, np.zeros(self.vocab, np.bool_), self._sizes == 0)


def _numbered(special: Mapping[str, int | None], ranks: Mapping[bytes, int], path: Path) -> dict[str, int]:
    ids: dict[str, int] = {}
    following = len(ranks)
    for token, stated in special.items():
        number = following if stated is None else stated
        if number < len(ranks) or number in ids.values():
            message = f"{path}: the special token {token} has the id {number:,}, which another token has"
            raise DataError(message, f"the ranks in the file are 0 to {len(ranks) - 1:,}")
        ids[token], following = number, number + 1
    return ids


def parse_ranks(data: bytes, path: Path) -> dict[bytes, int]:
    """Returns the ranks of a `.tiktoken` file. Raises DataError if the file is not valid."""
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
                f"{path}:{number}: expected a new token in base64, then the rank {len(ranks)}",
                "a .tiktoken file has one token per line, with ranks that count up from 0",
            ) from None
        ranks[piece] = len(ranks)
    missing = sum(bytes([value]) not in ranks for value in range(256))
    if missing:
        message = f"{path}: {missing} of the 256 single bytes have no rank"
        raise DataError(message, "the file is truncated, or is not a byte-level vocabulary")
    return ranks
