"""The two compressions that a section may have, and bounded ways back."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

from specc.runtime.errors import EnvironmentFailure, IntegrityError

SLACK_BYTES = 64 * 2**10  # a section is abandoned once it gives this much more than it declared
WINDOW_BITS = 24
# The decoder's memory is set here, by the reader: a raw stream says nothing of it. Codes are not text, so that no
# literal's high bits (lc) and no position (lp, pb) tell anything of the next.
_LZMA = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 2**20, "lc": 0, "lp": 0, "pb": 0}]


class Codec(IntEnum):
    """How the sections of a file are compressed. LZMA, of Python's own library, is for where brotli is missing."""

    BROTLI = 0
    LZMA = 1


def compress(raw: bytes, quality: int, codec: Codec = Codec.BROTLI) -> bytes:
    """`raw` as brotli of `quality` 0 to 11 with a 16 MiB window, or as LZMA2, which has one quality.

    Raises EnvironmentFailure without brotli.
    """
    if codec == Codec.LZMA:
        return lzma.compress(raw, lzma.FORMAT_RAW, filters=_LZMA)
    return bytes(_brotli().compress(raw, quality=quality, lgwin=WINDOW_BITS))


def decompressed(compressed: bytes, declared: int, label: str, codec: Codec = Codec.BROTLI) -> Iterator[bytes]:
    """Pieces of the raw bytes, little more than `declared` in all; the decoders' own limits are only wishes.

    Raises IntegrityError, naming `label`, for what is no such stream, is cut off, goes on after its end, or expands
    past what it declares; EnvironmentFailure without brotli.
    """
    return _from_lzma(compressed, declared, label) if codec == Codec.LZMA else _from_brotli(compressed, declared, label)


def _brotli() -> Any:
    try:
        import brotli
    except ImportError:
        hint = "install it, or export again with --codec lzma"
        raise EnvironmentFailure("the weights are compressed by brotli, which is not installed", hint) from None
    return brotli


def _from_brotli(compressed: bytes, declared: int, label: str) -> Iterator[bytes]:
    brotli = _brotli()
    decoder = brotli.Decompressor()
    given, position = 0, 0
    try:
        while not decoder.is_finished():
            # After a full piece the decoder takes no input until it has been emptied; and when all input is
            # in, it may still hold output back.
            hungry = decoder.can_accept_more_data()
            step = compressed[position : position + SLACK_BYTES] if hungry else b""
            position += len(step)
            piece = decoder.process(step, output_buffer_limit=SLACK_BYTES // 2)
            if hungry and not (step or piece or decoder.is_finished()):
                raise IntegrityError(f"{label} ends before its compressed stream does")
            given += len(piece)
            _bound(given, declared, label)
            yield piece
    except brotli.error as error:
        raise IntegrityError(f"{label} is not a brotli stream") from error
    if position != len(compressed):
        raise IntegrityError(f"{label} has bytes after its compressed stream")


def _from_lzma(compressed: bytes, declared: int, label: str) -> Iterator[bytes]:
    decoder = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_LZMA)
    given, step = 0, compressed
    try:
        while not decoder.eof:
            piece = decoder.decompress(step, max_length=SLACK_BYTES // 2)
            if not (piece or step or decoder.eof):
                raise IntegrityError(f"{label} ends before its compressed stream does")
            step = b""
            given += len(piece)
            _bound(given, declared, label)
            yield piece
    except (lzma.LZMAError, EOFError) as error:
        raise IntegrityError(f"{label} is not an LZMA stream") from error
    if decoder.unused_data:
        raise IntegrityError(f"{label} has bytes after its compressed stream")


def _bound(given: int, declared: int, label: str) -> None:
    if given > declared + SLACK_BYTES:
        raise IntegrityError(f"{label} expands past the {declared:,} bytes that it declares")
