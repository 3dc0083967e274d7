"""The artifact: what goes in comes out, in deterministic bytes, of the size that is told."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_samples import (
    CODE,
    INTERFACE,
    SMALL,
    Array,
    Layout,
    Tensors,
    assert_same,
    layout_of,
    random_arrays,
    spec_of,
    write,
)

from specc.compiler.quant.gptq import Gptq
from specc.compiler.quant.none import Unquantized
from specc.compiler.quant.round import Round
from specc.compiler.quant.scheme import Scheme, Stored
from specc.runtime.artifact import sections
from specc.runtime.artifact.artifact import (
    ArtifactContents,
    artifact_size,
    measured_bytes,
    peek_spec,
    read_artifact,
    write_artifact,
)
from specc.runtime.artifact.quantized_model import QuantizedModel, dequantized, quantize_tensors
from specc.runtime.errors import IntegrityError, RunFailure
from specc.runtime.storage.data_digests import DataDigests


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    rng = random.Random(0)
    for seed in range(60):
        layout: Layout = []
        for i in range(rng.randint(0, 6)):
            shape = tuple(rng.choice((0, 1, 2, 3, 7, 31, 64)) for _ in range(rng.randint(0, 3)))
            for suffix in rng.sample(("codes", "scale", "value"), rng.randint(1, 3)):
                layout.append((f"p{i}", Stored(suffix, rng.choice(("i8", "f16", "bf16", "f32")), shape)))
        path = tmp_path / "m.specc"
        tensors = write(path, layout, seed, note="ü" * rng.randint(0, 9))
        artifact = read_artifact(path, layout_of)
        assert artifact.spec == peek_spec(path) and json.loads(artifact.spec)["arrays"] is not None
        assert artifact.code == CODE
        assert_same(artifact, layout, tensors)


def test_arrays_longer_than_a_section(tmp_path: Path) -> None:
    chunk = sections.CHUNK_BYTES
    layout: Layout = [
        ("a", Stored("codes", "i8", (chunk - 5,))),
        ("b", Stored("codes", "i8", (chunk + 5,))),
        ("b", Stored("scale", "f16", (chunk // 2 + 3,))),
        ("c", Stored("value", "f32", (chunk // 4, 3))),
    ]
    tensors = write(tmp_path / "m.specc", layout)
    assert_same(read_artifact(tmp_path / "m.specc", layout_of), layout, tensors)
    pieces = {row.kind: (row.pieces, row.raw) for row in artifact_size(tmp_path / "m.specc").sections}
    assert pieces["codes"] == (3, 2 * chunk) and pieces["scales"] == (2, chunk + 6) and pieces["f32"] == (4, 3 * chunk)


@pytest.mark.parametrize("bits", [4, 5, 6, 7, 8])
def test_codes_survive_exactly(bits: int, tmp_path: Path) -> None:
    """All codes of a width in many shapes, odd ones too, and the weights that they stand for, bit for bit."""
    rng, top = np.random.default_rng(bits), 2 ** (bits - 1) - 1
    schemes: dict[str, Scheme] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    tensors: dict[str, dict[str, Array]] = {}
    for i in range(200):
        shape = (int(rng.integers(1, 40)), int(rng.integers(1, 80)))
        codes = rng.integers(-top, top + 1, shape).astype(np.int8)
        codes.flat[: 2 * top + 1] = np.arange(-top, top + 1)[: codes.size]
        name = f"p{i}"
        schemes[name] = Gptq(bits=bits) if i % 2 else Round(bits=bits)
        shapes[name] = shape
        tensors[name] = {"codes": codes, "scale": rng.uniform(1e-4, 1.0, shape[0]).astype(np.float16)}
    model = QuantizedModel(schemes, shapes, tensors)
    layout = list(model.layout())
    spec = spec_of(layout)
    path = tmp_path / "m.specc"
    write_artifact(
        path, ArtifactContents(spec=spec, interface=INTERFACE, code=CODE, layout=layout, tensors=tensors), quality=5
    )
    back = read_artifact(path, layout_of)
    assert_same(back, layout, tensors)
    weights, again = dequantized(model), dequantized(QuantizedModel(schemes, shapes, back.tensors))
    for name in schemes:
        assert torch.equal(weights[name], again[name])
        exact = tensors[name]["codes"].astype(np.float64) * tensors[name]["scale"].astype(np.float64)[:, None]
        assert np.array_equal(again[name].numpy(), exact.astype(np.float32))


def test_full_quality_and_the_sizes_that_are_told(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    schemes: dict[str, Scheme] = {"a": Round(bits=5), "b": Round(bits=6), "c": Unquantized(dtype="bf16")}
    params = {"a": torch.randn(64, 96, generator=generator), "b": torch.randn(31, 17, generator=generator)}
    params["c"] = torch.randn(100, generator=generator)
    model = quantize_tensors(params, schemes, {})
    layout = list(model.layout())
    spec = spec_of(layout)
    path = tmp_path / "m.specc"
    sizes = write_artifact(
        path, ArtifactContents(spec=spec, interface=INTERFACE, code=CODE, layout=layout, tensors=model.tensors)
    )
    assert sizes == artifact_size(path)
    assert sizes.total == path.stat().st_size == sizes.header + sum(row.compressed for row in sizes.sections)
    assert sizes.total == measured_bytes(ArtifactContents(spec=spec, layout=layout, tensors=model.tensors))
    assert [row.kind for row in sizes.sections] == ["spec", "codes", "scales", "bf16"]
    assert [row.raw for row in sizes.sections] == [len(spec), 64 * 96 + 31 * 17, 2 * (64 + 31), 200]
    # int5 and int6 codes near their entropy: less than packed bits would take.
    assert sizes.sections[1].compressed < (64 * 96 * 5 + 31 * 17 * 6) / 8
    for quality in (0, 5):
        measured = measured_bytes(ArtifactContents(spec=spec, layout=layout, tensors=model.tensors), quality=quality)
        assert measured != sizes.total


@pytest.mark.parametrize("table", [b"", b"a table"])
def test_digests_of_the_training_data_are_kept(table: bytes, tmp_path: Path) -> None:
    digests = DataDigests(train=INTERFACE.hex(), val=CODE.hex())
    tensors, spec = random_arrays(SMALL, 1), spec_of(SMALL)
    plain = ArtifactContents(spec, SMALL, tensors, INTERFACE, CODE, table)
    contents = replace(plain, trained_on=digests)
    size = write_artifact(tmp_path / "m", contents, quality=5)
    back = read_artifact(tmp_path / "m", layout_of)
    assert (back.trained_on, back.table, back.spec) == (digests, table, spec)
    assert_same(back, SMALL, tensors)
    assert size == artifact_size(tmp_path / "m") and size.total == measured_bytes(contents, quality=5)
    assert 100 < size.total - measured_bytes(plain, quality=5) < 130  # 64 bytes that do not compress, and their entry
    write_artifact(tmp_path / "none", plain, quality=5)
    assert read_artifact(tmp_path / "none", layout_of).trained_on is None


def test_equal_contents_are_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout: Layout = [*SMALL, ("e", Stored("codes", "i8", (3 * sections.CHUNK_BYTES,)))]
    write(tmp_path / "one", layout)
    for cores in (None, 1, 7):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        write(tmp_path / "two", layout)
        assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    reordered = {name: dict(reversed(arrays.items())) for name, arrays in reversed(random_arrays(layout, 0).items())}
    spec = spec_of(layout)
    write_artifact(
        tmp_path / "two",
        ArtifactContents(spec=spec, interface=INTERFACE, code=CODE, layout=layout, tensors=reordered),
        quality=5,
    )
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_byte_that_the_disk_changed_is_noticed_and_the_old_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "m")
    old, whole = (tmp_path / "m").read_bytes(), os.write
    for at in (0, 20, 100, -1):

        def corrupt(descriptor: int, data: Any, at: int = at) -> int:
            changed = bytearray(data)
            changed[at % len(changed)] ^= 0x10
            return whole(descriptor, bytes(changed))

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", corrupt)
            with pytest.raises(IntegrityError, match="m: the file does not contain what was written"):
                write(tmp_path / "m", seed=1)
        assert (tmp_path / "m").read_bytes() == old and len(list(tmp_path.iterdir())) == 1


def test_arguments_that_do_not_fit_are_refused_before_writing(tmp_path: Path) -> None:
    path = tmp_path / "m"
    tensors = random_arrays(SMALL, 0)

    def attempt(layout: Layout, given: Tensors, interface: bytes = INTERFACE, spec: bytes = b"{}") -> None:
        write_artifact(
            path, ArtifactContents(spec=spec, interface=interface, code=CODE, layout=layout, tensors=given), quality=5
        )

    with pytest.raises(RunFailure, match="b, value"):
        attempt(SMALL, {name: arrays for name, arrays in tensors.items() if name != "b"})
    with pytest.raises(RunFailure, match="z, value"):
        attempt(SMALL, {**tensors, "z": tensors["b"]})
    with pytest.raises(RunFailure, match=r"d, value: the array is float64\[\]"):
        attempt(SMALL, {**tensors, "d": {"value": np.zeros(())}})
    with pytest.raises(RunFailure, match=r"b, value: the array is uint16\[4\]"):
        attempt(SMALL, {**tensors, "b": {"value": np.zeros(4, np.uint16)}})
    with pytest.raises(RunFailure, match="twice"):
        attempt([*SMALL, SMALL[0]], tensors)
    with pytest.raises(ValueError, match="32 bytes"):
        attempt(SMALL, tensors, interface=b"short")
    with pytest.raises(RunFailure, match="resolved spec has"):
        attempt(SMALL, tensors, spec=b" " * (sections.MAX_SPEC_BYTES + 1))
    assert list(tmp_path.iterdir()) == []
