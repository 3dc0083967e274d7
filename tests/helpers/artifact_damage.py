"""Damage to artifacts: parts that are exchanged, headers that lie with true digests, and a process that reads them."""

import hashlib
import itertools
import random
import struct
import subprocess
import sys
from typing import Any

from export_samples import CODE, INTERFACE


def parts_of(data: bytes) -> list[bytes]:
    """prefix, one table entry per section, digest, then the sections."""
    count = struct.unpack_from("<I", data, 12)[0]
    cuts = [0, 80, *(80 + 44 * (i + 1) for i in range(count)), 112 + 44 * count]
    for i in range(count):
        cuts.append(cuts[-1] + struct.unpack_from("<I", data, 80 + 44 * i + 4)[0])
    assert cuts[-1] == len(data)
    return [data[a:b] for a, b in itertools.pairwise(cuts)]


def forge(entries: list[tuple[int, bytes, int]], **fields: Any) -> bytes:
    """An artifact with true digests. `entries` are (kind, compressed bytes, declared raw size)."""
    prefix = struct.pack(
        "<8sHHI32s32s",
        fields.get("magic", b"\x93SPECC\r\n"),
        fields.get("version", 1),
        fields.get("flags", 0),
        fields.get("count", len(entries)),
        fields.get("interface", INTERFACE),
        CODE,
    )
    for kind, body, raw in entries:
        prefix += struct.pack("<III", kind, fields.get("compressed", len(body)), raw) + hashlib.sha256(body).digest()
    return prefix + hashlib.sha256(prefix).digest() + b"".join(body for _, body, _ in entries)


def mutated(good: bytes, rng: random.Random) -> bytes:
    """An artifact whose header has one to four other bytes, and a true digest."""
    end = sum(len(part) for part in parts_of(good)[: 1 + struct.unpack_from("<I", good, 12)[0]])
    body = bytearray(good[:end])
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(end)
        body[at] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
    for at in range(81, end, 44):  # another transform, if the header were true, is another model
        body[at] = good[at]
    return bytes(body) + hashlib.sha256(body).digest() + good[end + 32 :]


READ = """
import json, resource, sys
from specc.compiler.quant.scheme import Stored
from specc.runtime.errors import IntegrityError
from specc.runtime.artifact.artifact import read_artifact
def layout_of(spec):
    rows = json.loads(spec)["arrays"]
    return bytes.fromhex(INTERFACE), [(n, Stored(s, d, tuple(x))) for n, s, d, x in rows]
"""


def in_process(body: str, *arguments: str) -> str:
    code = READ.replace("INTERFACE", repr(INTERFACE.hex())) + body
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
