"""Reads documents from plain text. A file either has separator lines between documents, or is divided into blocks."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path

from specc.runtime.data.documents import files
from specc.runtime.data.documents.files import bounded, open_file

SEPARATOR = b"<|endoftext|>"
# A .txt file of more than RUNNING_BYTES without any separator is running text. Running text is divided at line ends
# into documents of BLOCK_BYTES to 2 * BLOCK_BYTES. A large file can then be divided into splits, and needs little
# memory. If the user specifies the boundaries between documents, no file is running text.
RUNNING_BYTES = 256 * 1024
BLOCK_BYTES = 16 * 1024
_LINE_BYTES = 1024 * 1024


def is_separator(line: bytes) -> bool:
    return line.rstrip(b"\r\n") == SEPARATOR


def is_blank(line: bytes) -> bool:
    return len(line) < _LINE_BYTES and not line.strip()


def _lines(file: io.BufferedIOBase) -> Iterator[tuple[bytes, bool]]:
    begins = True
    while line := file.readline(_LINE_BYTES):
        yield line, begins
        begins = line.endswith(b"\n")


def separated(file: io.BufferedIOBase, path: Path, ends: Callable[[bytes], bool], may_run: bool) -> Iterator[bytes]:
    """Yields the documents between the separator lines of a text file. A document does not include the separator lines.

    Args:
        file: the open file.
        path: the path of the file, for messages and for a second pass over the file.
        ends: a function that returns whether a line is a separator.
        may_run: whether a large file without separators is running text. Each block of running text is a document.

    Raises:
        DataError: if a document has more than DOCUMENT_BYTES.
    """
    pending: list[bytes] = []
    size = 0
    running = False
    for line, begins in _lines(file):
        if begins and ends(line):
            may_run = False
            yield b"".join(pending)
            pending, size = [], 0
        else:
            pending.append(line)
            size += len(line)
            if size > files.DOCUMENT_BYTES:
                bounded(b"".join(pending), path)
            if may_run and size >= RUNNING_BYTES:  # the file is either running text, or begins with a long document
                may_run = False
                with open_file(path) as again:
                    running = not any(begins and ends(line) for line, begins in _lines(again))
            if running and size > 2 * BLOCK_BYTES:
                *blocks, rest = _blocks(b"".join(pending))
                yield from blocks
                pending, size = [rest], len(rest)
    yield b"".join(pending)


def _blocks(text: bytes) -> Iterator[bytes]:
    start = 0
    while len(text) - start > 2 * BLOCK_BYTES:
        cut = text.find(b"\n", start + BLOCK_BYTES, start + 2 * BLOCK_BYTES) + 1
        if not cut:
            cut = start + 2 * BLOCK_BYTES
            # Moves the cut to the start of a UTF-8 character
            while text[cut] & 0xC0 == 0x80 and cut > start + 2 * BLOCK_BYTES - 3:
                cut -= 1
        yield text[start:cut]
        start = cut
    yield text[start:]
