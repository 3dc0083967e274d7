"""The tokenizer for `tokenizer.json` files of Hugging Face, which the library `tokenizers` reads."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specc.runtime.data.errors import DataError
from specc.runtime.data.tokenizers.files import byte_offsets, id_dtype, missing_package, read_file, valid_text
from specc.runtime.data.tokenizers.tokenizer import PieceBytes, TokenArray, Tokenizer

MODELS = ("BPE", "Unigram")
SPACE_MARK = "\u2581"
# The usual names of the token that separates documents. They apply to files whose post-processor inserts no token.
SEPARATORS = ("<|endoftext|>", "<|begin_of_text|>", "<|bos|>", "<bos>", "<s>", "</s>", "<eos>")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_spelling() -> Mapping[str, int]:
    """Returns a mapping from each character of a byte-level vocabulary to the byte that the character represents.

    The mapping is the mapping of GPT-2. If a byte is a printable character in Latin-1, this character represents the
    byte. The code points from 256 on represent all other bytes, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + k): value for k, value in enumerate(others)}


class JsonTokenizer(Tokenizer):
    """A tokenizer from a `tokenizer.json` file with a BPE or Unigram model.

    The tokenizer is lossless if it is byte-level, does not normalize text and drops no text. Special tokens in a
    document are treated as ordinary text. Text must be valid UTF-8.

    Args:
        path: the `tokenizer.json` file.
        bos: the token that precedes each document. The default is the token that the post-processor of the file inserts
            first. If the post-processor inserts no token, the default is the only special token. If there are several
            special tokens, the default is the first special token in the order of SEPARATORS.

    Attributes:
        inserted: the ids that the post-processor of the file adds to a text.

    Raises:
        DataError: if the file is invalid, has no token `bos`, or has a model that is not supported.
        EnvironmentFailure: if the library `tokenizers` is not installed.
    """

    def __init__(self, path: str | Path, bos: str | None = None) -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise missing_package(path, "tokenizers") from None
        data = read_file(Path(path))
        try:
            content, self._library = json.loads(data), Library.from_str(data.decode("utf-8"))
        except Exception as error:  # the library raises no more specific exception class
            hint = "copy the file again, or update tokenizers"
            raise DataError(f"{path}: not a tokenizer.json: {str(error)[:200]}", hint) from None
        kind = type(self._library.model).__name__
        if kind not in MODELS:
            message = f"{path}: a model of type {kind}, which cannot represent all text"
            raise DataError(message, f"use a tokenizer with a model of type {' or '.join(MODELS)}")
        if content["model"].get("dropout"):
            raise DataError(
                f"{path}: the tokenizer drops merges at random", "set the model's dropout to null in the file"
            )
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True
        self.name = Path(path).name
        words: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        self.vocab = max(words.values(), default=-1) + 1
        self._specials = {token["id"] for token in content.get("added_tokens") or () if token["special"]}
        self.inserted: list[int] = self._library.encode("", add_special_tokens=True).ids
        self.bos = self._separator(bos, path)
        self._pieces = _pieces(content, words, self._specials, self.vocab)
        self.lossless = _is_lossless(content, words)
        marks = b"" if bos is None else b"\0" + bos.encode()
        self._digest = hashlib.sha256(b"tokenizer.json\0" + data + marks).hexdigest()

    def _separator(self, bos: str | None, path: str | Path) -> int | None:
        library = self._library
        if bos is not None:
            identity = library.token_to_id(bos)
            if identity is None:
                raise DataError(f"{path} has no token {bos}", "set train.data.bos to a token of the file")
            return int(identity)
        if self.inserted or len(self._specials) == 1:
            return int([*self.inserted, *self._specials][0])
        named: list[int | None] = [library.token_to_id(token) for token in SEPARATORS]
        return next((identity for identity in named if identity in self._specials), None)

    def word(self, identity: int) -> str:
        return str(self._library.id_to_token(identity))

    def encode(self, text: bytes) -> TokenArray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[bytes]) -> list[TokenArray]:
        strings = [valid_text(self.name, text) for text in texts]
        encoded = self._library.encode_batch_fast(strings, add_special_tokens=False) if strings else []
        return [np.array(document.ids, id_dtype(self.vocab)) for document in encoded]

    def _ends(self, text: bytes, ids: TokenArray) -> npt.NDArray[np.int64]:
        string = text.decode("utf-8")
        encoded = self._library.encode(string, add_special_tokens=False)
        return byte_offsets(string)[[end for _, end in encoded.offsets]]

    def decode(self, ids: Sequence[int] | TokenArray) -> bytes:
        checked = self.checked(ids).tolist()
        if self._pieces is not None:
            return b"".join(self._pieces[i] for i in checked)
        return str(self._library.decode(checked, skip_special_tokens=True)).encode("utf-8")

    def piece_bytes(self) -> PieceBytes:
        if self._pieces is None:
            message = f"{self.name}: its decoder changes text, so bytes cannot be counted by tokens"
            raise DataError(message, "pack the text with `specc data pack`, which counts the bytes of each token")
        sizes = np.array([len(piece) for piece in self._pieces], np.int64)
        return PieceBytes(sizes, np.zeros(self.vocab, np.bool_), sizes == 0)


def _steps(part: Mapping[str, Any] | None, members: str) -> Iterator[Mapping[str, Any]]:
    if part is not None and part["type"] == "Sequence":
        for inner in part[members]:
            yield from _steps(inner, members)
    elif part is not None:
        yield part


def _pieces(content: Mapping[str, Any], words: Mapping[str, int], specials: set[int], vocab: int) -> list[bytes] | None:
    """Returns the bytes of each id of a tokenizer; empty bytes for special and unused ids. Returns None if the text of
    a sequence of ids is not the concatenation of their bytes.

    `content` is the parsed `tokenizer.json`. `words` maps the tokens of its vocabulary to ids.
    """
    decoders = list(_steps(content.get("decoder"), "decoders"))
    kinds = [step["type"] for step in decoders]
    spelling = byte_spelling()
    if kinds == ["ByteLevel"]:

        def spell(word: str) -> bytes:
            return bytes(spelling[char] for char in word) if spelling.keys() >= set(word) else word.encode()

    elif kinds == ["Replace", "ByteFallback", "Fuse"] and (decoders[0]["pattern"], decoders[0]["content"]) == (
        {"String": SPACE_MARK},
        " ",
    ):

        def spell(word: str) -> bytes:
            byte = _BYTE.fullmatch(word)
            return word.replace(SPACE_MARK, " ").encode() if byte is None else bytes([int(byte[1], 16)])

    else:
        return None
    added = {token["id"]: token["content"].encode() for token in content.get("added_tokens") or ()}
    pieces = [b""] * vocab
    for word, identity in words.items():
        pieces[identity] = b"" if identity in specials else added.get(identity) or spell(word)
    return pieces


def _is_lossless(content: Mapping[str, Any], words: Mapping[str, int]) -> bool:
    cuts = list(_steps(content.get("pre_tokenizer"), "pretokenizers"))
    levels = [step for step in cuts if step["type"] == "ByteLevel"]
    whole = all(
        step["type"] in ("ByteLevel", "Digits") or step.get("behavior", "Removed") != "Removed" for step in cuts
    )
    added = [token for token in content.get("added_tokens") or () if not token["special"]]
    return (
        content.get("normalizer") is None
        and len(levels) == 1
        and not levels[0].get("add_prefix_space", True)
        and whole
        and not any(token["lstrip"] or token["rstrip"] for token in added)
        and words.keys() >= byte_spelling().keys()
        and [step["type"] for step in _steps(content.get("decoder"), "decoders")] == ["ByteLevel"]
    )
