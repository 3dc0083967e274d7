"""Compresses and decompresses the sections of an artifact by brotli or LZMA2. Decompression stops at a maximum size."""

import lzma
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

from specc.runtime.errors import EnvironmentFailure, IntegrityError

SLACK_BYTES = 64 * 2**10  # the number of bytes by which the output may exceed the declared size
WINDOW_BITS = 24
# A raw LZMA stream does not state its dictionary size. This fixed size limits the memory of the decoder. lc, lp and pb
# are 0, because neither the previous byte nor the position predicts the next quantization code.
_LZMA = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 2**20, "lc": 0, "lp": 0, "pb": 0}]


class Codec(IntEnum):
    """The compression method of all sections of a file. LZMA is in Python's standard library. Brotli is a separate
    package.
    """

    BROTLI = 0
    LZMA = 1


def compress(raw: bytes, quality: int, codec: Codec = Codec.BROTLI) -> bytes:
    """Returns `raw` compressed with brotli or LZMA2.

    `quality`, 0 to 11, applies only to brotli, which uses a 16 MiB window. Raises EnvironmentFailure if `codec` is
    brotli and brotli is not installed.
    """
    if codec == Codec.LZMA:
        return lzma.compress(raw, lzma.FORMAT_RAW, filters=_LZMA)
    return bytes(_brotli().compress(raw, quality=quality, lgwin=WINDOW_BITS))


def decompressed(compressed: bytes, declared: int, label: str, codec: Codec = Codec.BROTLI) -> Iterator[bytes]:
    """Yields pieces of the decompressed bytes, at most `declared` + `SLACK_BYTES` in total.

    The function checks the total itself, because the decoders of the libraries may exceed a limit that they are given.

    Args:
        compressed: the compressed section.
        declared: the raw size that the header declares, in bytes.
        label: the name of the section, for error messages.
        codec: the compression of the section.

    Returns:
        An iterator over the pieces. Errors are raised during iteration.

    Raises:
        IntegrityError: if `compressed` is not valid for `codec`, or expands to more than `declared` + `SLACK_BYTES`
            bytes.
        EnvironmentFailure: if `codec` is brotli, and brotli is not installed.
    """
    if codec == Codec.LZMA:
        decoder: Any = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_LZMA)
        decode: Any = decoder.decompress
        failure: type[Exception] = lzma.LZMAError
    else:
        decoder = _brotli().Decompressor()
        decode, failure = decoder.process, _brotli().error

    def finished() -> bool:
        return bool(decoder.eof if codec == Codec.LZMA else decoder.is_finished())

    produced = position = 0
    try:
        while not finished():
            # While its output buffer is full, the decoder accepts no input. After the last input, output may still be
            # pending.
            hungry = decoder.needs_input if codec == Codec.LZMA else decoder.can_accept_more_data()
            step = compressed[position : position + SLACK_BYTES] if hungry else b""
            position += len(step)
            piece = decode(step, SLACK_BYTES // 2)
            if hungry and not (step or piece or finished()):
                raise IntegrityError(f"{label} is truncated: its compressed stream continues")
            produced += len(piece)
            if produced > declared + SLACK_BYTES:
                raise IntegrityError(f"{label} expands to more than the {declared:,} bytes that the header declares")
            yield piece
    except failure as error:
        raise IntegrityError(f"{label} is not a valid {codec.name.lower()} stream") from error
    if position != len(compressed) or (codec == Codec.LZMA and decoder.unused_data):
        raise IntegrityError(f"{label} has extra bytes after its compressed stream")


def _brotli() -> Any:
    try:
        import brotli
    except ImportError:
        hint = "install it, or export again with --codec lzma"
        raise EnvironmentFailure("the weights are compressed by brotli, which is not installed", hint) from None
    return brotli
