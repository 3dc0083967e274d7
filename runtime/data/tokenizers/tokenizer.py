"""Tokenizers: raw bytes, SentencePiece models, tiktoken rank files. Nothing is ever downloaded."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specc.runtime.data.errors import DataError

TokenArray = npt.NDArray[np.integer[Any]]

SPACE_MARK = "\u2581"  # SentencePiece writes a space as this character
MAX_UINT16_VOCAB = 1 << 16

# GPT-2's pre-tokenizer. The possessive quantifiers match the same pieces as plain ones, without backtracking.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
GPT2_SEPARATOR = "<|endoftext|>"

# `\s+(?!\S)` backtracks by recursion and overflows the regex engine's stack near a million characters, so
# long runs are cut out first. The class is Unicode White_Space, which is what `\s` means to that engine (not
# to `re`).
_WHITE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_LONG_BLANK = re.compile(f"[{_WHITE}]{{2000,}}")
# Bytes that are not UTF-8, as the "surrogateescape" handler spells them.
_ESCAPED = re.compile("([\udc80-\udcff]+)")


@dataclass(frozen=True, slots=True)
class PieceBytes:
    """How many bytes of text each token stands for (the table of OpenAI's parameter-golf challenge).

    A target y after x counts `base[y]` bytes, and one more if y starts with a space mark and x is not a
    boundary: the space that a SentencePiece model puts in front of a document is not in the document.

    Attributes:
        base: int64 [vocab], bytes without a leading space mark; 0 for control, unknown and unused ids.
        leading_space: bool [vocab], the piece starts with a space mark.
        boundary: bool [vocab], control, unknown and unused ids.
    """

    base: npt.NDArray[np.int64]
    leading_space: npt.NDArray[np.bool_]
    boundary: npt.NDArray[np.bool_]

    def count(self, previous: TokenArray, targets: TokenArray) -> npt.NDArray[np.int64]:
        """Bytes (int64) charged to each of `targets` when it follows the same element of `previous`."""
        space = self.leading_space[targets] & ~self.boundary[previous]
        counts: npt.NDArray[np.int64] = self.base[targets] + space
        return counts


class Tokenizer(Protocol):
    """Bytes of a document to token ids and back.

    Attributes:
        name: what `open_tokenizer` takes to open it again, without its folder.
        vocab: number of ids, special ones included.
        bos: the id written before each document; None if the tokenizer has none.
        lossless: `decode(encode(text)) == text` for every document it accepts.
    """

    @property
    def name(self) -> str: ...
    @property
    def vocab(self) -> int: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def lossless(self) -> bool: ...

    def encode(self, text: bytes) -> TokenArray:
        """Ids of one document, without BOS: uint16, or uint32 if vocab needs it. Raises DataError."""
        ...

    def encode_batch(self, texts: Sequence[bytes]) -> list[TokenArray]:
        """`encode` of each document, on all cores where the tokenizer can."""
        ...

    def decode(self, ids: Sequence[int] | TokenArray) -> bytes:
        """Text of the ids; control ids give nothing. Raises DataError for an id out of range."""
        ...

    def piece_bytes(self) -> PieceBytes:
        """The table of bytes per token. Raises DataError if this tokenizer cannot be counted by pieces."""
        ...

    def digest(self) -> str:
        """SHA-256 (hex) of everything that decides the ids."""
        ...


class ByteTokenizer:
    """Ids 0..255 are the bytes themselves; 256 is BOS. Lossless on any bytes."""

    name = "bytes"
    vocab = 257
    bos: int | None = 256
    lossless = True

    def encode(self, text: bytes) -> TokenArray:
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[bytes]) -> list[TokenArray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | TokenArray) -> bytes:
        array = _checked_ids(ids, self)
        return bytes(array[array != 256].astype(np.uint8))

    def piece_bytes(self) -> PieceBytes:
        boundary = np.arange(257) == 256
        return PieceBytes((~boundary).astype(np.int64), np.zeros(257, np.bool_), boundary)

    def digest(self) -> str:
        return hashlib.sha256(b"bytes 0..255, bos 256").hexdigest()


class SentencePieceTokenizer:
    """A SentencePiece `.model` file. Never lossless: it normalizes text, and U+2581 reads back as a space.

    The separator is the model's BOS, else its EOS. Text must be valid UTF-8.
    """

    lossless = False

    def __init__(self, path: str | Path) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise DataError(f"{path}: sentencepiece is not installed", "pip install sentencepiece") from None
        data = _read(Path(path))
        try:
            self._model = SentencePieceProcessor(model_proto=data)
            self.vocab = int(self._model.get_piece_size())
        except (RuntimeError, OSError, ValueError, TypeError):
            self.vocab = 0
        if self.vocab == 0:
            raise DataError(f"{path}: not a SentencePiece model", "copy the .model file again")
        specials = (int(self._model.bos_id()), int(self._model.eos_id()))
        self.bos: int | None = next((token for token in specials if token >= 0), None)
        self.name = Path(path).name
        self._digest = hashlib.sha256(b"sentencepiece\0" + data).hexdigest()

    def encode(self, text: bytes) -> TokenArray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[bytes]) -> list[TokenArray]:
        strings = [self._text(text) for text in texts]
        lists = self._model.encode(strings, out_type=int, num_threads=_cores()) if strings else []
        return [np.array(ids, _dtype(self.vocab)) for ids in lists]

    def _text(self, text: bytes) -> str:
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.name}: the document is not valid UTF-8 at byte {error.start}",
                "convert it to UTF-8, or use the tokenizer `bytes` or a .tiktoken file, which take any bytes",
            ) from None

    def decode(self, ids: Sequence[int] | TokenArray) -> bytes:
        text = self._model.decode(_checked_ids(ids, self).tolist(), out_type=str)
        return str(text).encode("utf-8")

    def piece_bytes(self) -> PieceBytes:
        """Inner space marks count one byte each (the challenge's models have none: there the tables agree).

        Raises:
            DataError: U+2581 alone is not a piece; spaces then become three byte pieces or unknowns, and any
                count by pieces is wrong (by about 20 % on English).
        """
        model, ids = self._model, range(self.vocab)
        pieces = [str(model.id_to_piece(i)) for i in ids]
        is_byte = np.array([model.is_byte(i) for i in ids], np.bool_)
        boundary = np.array([model.is_control(i) or model.is_unknown(i) or model.is_unused(i) for i in ids], np.bool_)
        if not any(piece == SPACE_MARK and not boundary[i] for i, piece in enumerate(pieces)):
            raise DataError(
                f"{self.name}: U+2581 (the space mark) is not a piece, so bytes cannot be counted by pieces",
                "train the model with U+2581 among the required characters, or use another tokenizer",
            )
        space = np.array([piece.startswith(SPACE_MARK) for piece in pieces], np.bool_)
        lengths = [len(piece.removeprefix(SPACE_MARK).replace(SPACE_MARK, " ").encode("utf-8")) for piece in pieces]
        base = np.where(is_byte, 1, np.array(lengths, np.int64))
        base[boundary] = 0
        return PieceBytes(base, space & ~is_byte & ~boundary, boundary)

    def digest(self) -> str:
        return self._digest


class TiktokenTokenizer:
    """A `.tiktoken` rank file (lines of base64 bytes and rank) with GPT-2's pattern. Lossless on any bytes.

    `<|endoftext|>` takes the id after the last rank and separates documents; in a document it is ordinary
    text. Bytes that are not UTF-8 become one token each.
    """

    lossless = True

    def __init__(self, path: str | Path) -> None:
        try:
            from tiktoken import Encoding
        except ImportError:
            raise DataError(f"{path}: tiktoken is not installed", "pip install tiktoken") from None
        # tiktoken's own loader keeps a copy of local files in a temporary folder, keyed by path: it goes
        # stale.
        data = _read(Path(path))
        ranks = _parse_ranks(data, Path(path))
        self.name = Path(path).name
        self.vocab = len(ranks) + 1
        self.bos: int | None = len(ranks)
        self._pieces = sorted(ranks, key=ranks.__getitem__)
        self._byte_ids: TokenArray = np.array([ranks[bytes([value])] for value in range(256)], _dtype(self.vocab))
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
        with ThreadPoolExecutor(_cores()) as pool:  # the encoder lets go of the interpreter lock
            return list(pool.map(self.encode, texts))

    def decode(self, ids: Sequence[int] | TokenArray) -> bytes:
        return b"".join(self._pieces[i] for i in _checked_ids(ids, self).tolist() if i != self.bos)

    def piece_bytes(self) -> PieceBytes:
        base = np.array([len(piece) for piece in self._pieces] + [0], np.int64)
        return PieceBytes(base, np.zeros(self.vocab, np.bool_), np.arange(self.vocab) == self.bos)

    def digest(self) -> str:
        return self._digest


def open_tokenizer(name: str, search: Sequence[Path] = ()) -> Tokenizer:
    """Open a tokenizer by name: `bytes`, or a `.model` or `.tiktoken` file, in one of `search` or as given.

    Raises:
        DataError: unknown kind, not found (the message lists where it looked), or not a valid file.
    """
    if name == "bytes":
        return ByteTokenizer()
    kinds: dict[str, Callable[[Path], Tokenizer]] = {
        ".model": SentencePieceTokenizer,
        ".tiktoken": TiktokenTokenizer,
    }
    kind = kinds.get(Path(name).suffix)
    if kind is None:
        raise DataError(
            f"unknown tokenizer {name!r}",
            "use `bytes`, a SentencePiece file (*.model) or a tiktoken rank file (*.tiktoken)",
        )
    return kind(_found(name, search))


def tokenizer_files(name: str, search: Sequence[Path] = ()) -> list[Path]:
    """The files that `open_tokenizer` reads: none for `bytes`. Raises DataError where one is not found."""
    return [] if name == ByteTokenizer.name else [_found(name, search)]


def _found(name: str, search: Sequence[Path]) -> Path:
    """In the folders in their order, so that what a run keeps goes before a file of that name that happens to lie here;
    copies, of a run or of packed data, have the file's name alone."""
    given = Path(name).expanduser()
    named = [Path(folder) / one for folder in search for one in (given, given.name)]
    places = list(dict.fromkeys([*named, given]))
    for place in places:
        if place.is_file():
            return place
    looked = ", ".join(str(place) for place in places)
    raise DataError(f"no tokenizer {name!r}; looked at {looked}", "give its path; tokenizers are never downloaded")


def require_16_bits(tokenizer: Tokenizer) -> None:
    """Raises DataError unless every id fits in the 16 bits of a token shard."""
    if tokenizer.vocab > MAX_UINT16_VOCAB:
        raise DataError(
            f"{tokenizer.name}: {tokenizer.vocab:,} ids do not fit in the 16 bits of a token shard",
            f"use a tokenizer of at most {MAX_UINT16_VOCAB:,} ids: larger vocabularies cannot be trained on yet",
        )


def require_bos(tokenizer: Tokenizer) -> None:
    """Raises DataError unless the tokenizer has an id to put before documents."""
    if tokenizer.bos is None:
        raise DataError(
            f"{tokenizer.name}: has neither BOS nor EOS, so documents cannot be separated",
            "train the SentencePiece model with a bos_id",
        )


def _segments(text: str) -> list[str]:
    """Cut `text` where GPT-2's pattern always cuts, around long runs of white space.

    Of such a run before a word, all but the last character is one piece by itself.
    """
    cuts = [0]
    for match in _LONG_BLANK.finditer(text):
        if match.end() < len(text):  # a run at the end is one piece, found without backtracking
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
            f"{path}: {missing} of the 256 single bytes have no rank",
            "the file is cut, or not a byte-level vocabulary",
        )
    return ranks


def _checked_ids(ids: Sequence[int] | TokenArray, tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    array = np.asarray(ids, np.int64)
    if array.size and (array.min() < 0 or array.max() >= tokenizer.vocab):
        bad = array[(array < 0) | (array >= tokenizer.vocab)][0]
        raise DataError(f"{tokenizer.name}: no token {bad}; the vocabulary has {tokenizer.vocab:,}")
    return array


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def _dtype(vocab: int) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if vocab <= MAX_UINT16_VOCAB else np.uint32


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
