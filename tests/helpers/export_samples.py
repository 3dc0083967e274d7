"""Layouts and arrays for the tests of the artifact; a spec that lists its arrays stands for the compiler."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specc.compiler.quant.scheme import Stored
from specc.runtime.artifact.artifact import ArtifactContents, write_artifact

Array = np.ndarray[Any, Any]
Tensors = Mapping[str, Mapping[str, Array]]
Layout = list[tuple[str, Stored]]
INTERFACE, CODE = hashlib.sha256(b"interface").digest(), hashlib.sha256(b"code").digest()


def layout_of(spec: bytes) -> tuple[bytes, Layout]:
    """Stands for the compiler: the spec of these tests lists its arrays."""
    rows = json.loads(spec)["arrays"]
    return INTERFACE, [(name, Stored(suffix, dtype, tuple(shape))) for name, suffix, dtype, shape in rows]


def spec_of(layout: Layout, **more: object) -> bytes:
    rows = [[name, s.suffix, s.dtype, list(s.shape)] for name, s in layout]
    return json.dumps({"arrays": rows, **more}).encode()


def random_arrays(layout: Layout, seed: int) -> dict[str, dict[str, Array]]:
    """Any bits at all, NaN and -128 among them: the file does not judge values."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, dict[str, Array]] = {}
    for name, stored in layout:
        raw = rng.integers(0, 256, stored.bytes, dtype=np.uint8)
        if stored.dtype == "i8":
            raw = (raw % 31).astype(np.uint8)
        tensors.setdefault(name, {})[stored.suffix] = raw.view(stored.numpy_dtype()).reshape(stored.shape)
    return tensors


SMALL: Layout = [
    ("a", Stored("codes", "i8", (5, 7))),
    ("a", Stored("scale", "f16", (5,))),
    ("b", Stored("value", "bf16", (3,))),
    ("c", Stored("value", "f16", (2, 2))),
    ("d", Stored("value", "f32", ())),
]


def write(path: Path, layout: Layout = SMALL, seed: int = 0, **more: object) -> dict[str, dict[str, Array]]:
    tensors = random_arrays(layout, seed)
    spec = spec_of(layout, **more)
    write_artifact(
        path, ArtifactContents(spec=spec, interface=INTERFACE, code=CODE, layout=layout, tensors=tensors), quality=5
    )
    return tensors


def assert_same(artifact: ArtifactContents, layout: Layout, tensors: Tensors) -> None:
    assert {n: set(a) for n, a in artifact.tensors.items()} == {n: set(a) for n, a in tensors.items()}
    for name, stored in layout:
        got, want = artifact.tensors[name][stored.suffix], tensors[name][stored.suffix]
        assert got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()
