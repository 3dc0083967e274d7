"""Artifacts of int8 models that were damaged and sealed anew, digests and all: each is refused, with node, expected and
got, before anything is computed."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from int8_models import LSTM, Int8Models, data_of, quantized_model
from tiny_models import spec_of

from specc.compiler.build import canonical
from specc.compiler.quant.scheme import Stored
from specc.runtime.artifact import table
from specc.runtime.artifact.artifact import ArtifactContents, artifact_size, write_artifact
from specc.runtime.artifact.deployment import Deployment
from specc.runtime.artifact.table import Entry
from specc.runtime.errors import IntegrityError
from specc.runtime.open_model import open_model, read_verified

Arrays = dict[str, dict[str, Any]]
WEIGHT, BIAS = "head.logits", "head.logits_bias"  # [31, 16] and [31]
SQUARE = "decoder.cross.q"  # [16, 16]


@cache
def model() -> Int8Models:
    return quantized_model(spec_of(data_of(LSTM)))


def sealed(path: Path, tensors: Arrays, array_table: bytes | None = None) -> Path:
    """An artifact of these arrays, with digests that fit them: sections, header and, unless it is `told`, table of
    arrays."""
    models = model()
    deployment = Deployment.of(models.spec)
    dtypes = {stored.numpy_dtype(): stored.dtype for _, stored in deployment.layout}
    layout = [
        (name, Stored(suffix, dtypes.get(array.dtype, "f16"), array.shape))
        for name, arrays in tensors.items()
        for suffix, array in arrays.items()
    ]
    write_artifact(
        path,
        ArtifactContents(
            spec=canonical(models.spec).encode(),
            interface=deployment.interface,
            code=deployment.code,
            layout=layout,
            tensors=tensors,
            table=table.packed(table.entries(tensors).values()) if array_table is None else array_table,
        ),
        quality=5,
    )
    return path


def arrays() -> Arrays:
    return {name: dict(results) for name, results in model().stored.tensors.items()}


def test_what_is_sound_is_read(tmp_path: Path) -> None:
    path = sealed(tmp_path / "m.specc", arrays())
    assert read_verified(path).spec == model().spec
    sizes = {section.kind: section for section in artifact_size(path).sections}
    assert 0 < sizes["table"].compressed < sizes["table"].raw and artifact_size(path).total == path.stat().st_size


def transposed(tensors: Arrays) -> None:
    tensors[WEIGHT]["codes"] = np.ascontiguousarray(tensors[WEIGHT]["codes"].T)


def set_number(name: str, suffix: str, value: float, at: int = 0) -> Callable[[Arrays], None]:
    def change(tensors: Arrays) -> None:
        tensors[name][suffix] = tensors[name][suffix].copy()
        tensors[name][suffix][at] = value

    return change


def put(name: str, suffix: str, make: Callable[[Any], Any]) -> Callable[[Arrays], None]:
    def change(tensors: Arrays) -> None:
        tensors[name][suffix] = make(tensors[name][suffix])

    return change


def drop(name: str, suffix: str) -> Callable[[Arrays], None]:
    return lambda tensors: tensors[name].pop(suffix)


DAMAGE: dict[str, tuple[Callable[[Arrays], None], str]] = {
    "transposed": (
        transposed,
        r"head\.logits: the weight has 31 columns, but its input has 16 features \(decoder\..*\): the weight is stored",
    ),
    "K": (
        put(WEIGHT, "codes", lambda a: np.zeros((31, 32), np.int8)),
        r"head\.logits: the weight has 32 columns, but its input has 16 features \(decoder\.",
    ),
    "K of as many bytes": (
        put(WEIGHT, "codes", lambda a: a.reshape(62, 8)),
        r"head\.logits: the weight has 8 columns, but its input has 16 features \(decoder\.",
    ),
    "N": (put(WEIGHT, "codes", lambda a: a[:30]), r"head\.logits: the weight has 30 rows, and the model has 31"),
    "N padded": (
        put(WEIGHT, "codes", lambda a: np.pad(a, ((0, 1), (0, 0)))),
        r"head\.logits: the weight has 32 rows, and the model has 31",
    ),
    "bias": (
        put(BIAS, "codes", lambda a: a[:30]),
        r"head\.logits: the weight has 31 rows, but its bias has 30 numbers",
    ),
    "bias of many rows": (
        put(BIAS, "codes", lambda a: np.stack([a] * 6)),
        r"head\.logits: the weight has 31 rows, but its bias has the shape \[6, 31\]",
    ),
    "scales": (
        put(WEIGHT, "scale", lambda a: a[:5]),
        r"head\.logits: the weight has 31 rows, but its scales have the shape \[5\]",
    ),
    "scales of the bias": (
        put(BIAS, "scale", lambda a: a[:5]),
        r"head\.logits: the weight has 31 rows, but the scales of its bias have the shape \[5\]",
    ),
    "input scale": (
        put(WEIGHT, "input_scale", lambda a: np.repeat(a, 3)),
        r"head\.logits: the input has 16 features \(decoder\..*\), but its scales have the shape \[3\]",
    ),
    "input scale by feature": (
        put(WEIGHT, "input_scale", lambda a: np.repeat(a, 16)),
        r"head\.logits, input_scale is f32\[16\] in the file but f32\[1\] in the model",
    ),
    "weight in floats": (
        put(WEIGHT, "codes", lambda a: a.astype(np.float32)),
        r"head\.logits: the weight is stored as f32, but its product reads i8",
    ),
    "bias in floats": (
        put(BIAS, "codes", lambda a: a.astype(np.float32)),
        r"head\.logits: the bias is stored as f32, but is added to i32 sums",
    ),
    "embeddings in halves": (
        put("encoder.embed.token", "value", lambda a: a.astype(np.float16)),
        r"encoder\.embed\.token, value is f16\[31,12\] in the file but f32\[31,12\] in the model",
    ),
    "no weight": (drop(WEIGHT, "codes"), r"head\.logits: head\.logits, codes is not in the file"),
    "no scale": (drop(BIAS, "scale"), r"head\.logits: head\.logits_bias, scale is not in the file"),
    "no embedding": (
        lambda tensors: tensors.pop("encoder.embed.token"),
        r"encoder\.embed\.token, value is not in the file",
    ),
    "one more": (
        lambda tensors: tensors.update({"head.more": {"codes": np.zeros((4, 4), np.int8)}}),
        r"head\.more, codes is in the file, but not in the spec",
    ),
}
for bad in (0.0, -1.0, float("nan"), float("inf"), 1e30, 1e-30):
    shown = f"{np.float32(bad):.6g}".replace("+", r"\+")
    DAMAGE[f"input scale {bad}"] = (
        set_number(WEIGHT, "input_scale", bad),
        rf"head\.logits: the scale of its input, number 0 of 1, is {shown}; it must be",
    )
    DAMAGE[f"scale of a bias {bad}"] = (
        set_number(BIAS, "scale", bad, 7),
        rf"head\.logits_bias: a scale, number 7 of 31, is {shown}; it must be",
    )
for bad in (0.0, -1.0, float("nan"), float("inf")):
    DAMAGE[f"row scale {bad}"] = (
        set_number(WEIGHT, "scale", bad, 3),
        rf"head\.logits: a row scale, number 3 of 31, is {bad:g}; it must be",
    )
DAMAGE["a code of -128"] = (put(WEIGHT, "codes", lambda a: np.full_like(a, -128)), r"a code is outside \[-127, 127\]")
DAMAGE["a bias beyond int32"] = (set_number(BIAS, "codes", 2**31 - 1), r"head\.logits_bias: a code is outside")
DAMAGE["another input scale"] = (
    put(WEIGHT, "input_scale", lambda a: a * 2),
    r"head\.logits: head\.logits_bias was quantized with other scales than those of head\.logits",
)
DAMAGE["another scale of a shared input"] = (
    put("decoder.cross.v", "input_scale", lambda a: a * 2),
    r"decoder\.cross\.v_biased: decoder\.cross\.v_bias was quantized with other scales|have different input scales",
)


@pytest.mark.parametrize("what", DAMAGE)
def test_a_file_that_was_changed_and_sealed_anew_is_refused(what: str, tmp_path: Path) -> None:
    change, message = DAMAGE[what]
    result = arrays()
    change(result)
    path = sealed(tmp_path / "m.specc", result)
    with pytest.raises(IntegrityError, match=message) as raised:
        open_model(path, "cpu", "cpu")
    assert raised.value.message.startswith(f"{path}: ") and raised.value.exit_code == 5
    assert raised.value.hint == table.AGAIN


def test_a_square_weight_that_was_transposed_is_refused(tmp_path: Path) -> None:
    """Of as many bytes and the same shape: only what was stored tells."""
    whole, changed = table.packed(table.entries(arrays()).values()), arrays()
    changed[SQUARE]["codes"] = np.ascontiguousarray(changed[SQUARE]["codes"].T)
    assert changed[SQUARE]["codes"].shape == arrays()[SQUARE]["codes"].shape
    path = sealed(tmp_path / "m.specc", changed, whole)
    with pytest.raises(
        IntegrityError, match=r"decoder\.cross\.q, codes i8\[16,16\] does not have the checksum in its table"
    ):
        read_verified(path)


def test_a_weight_column_by_column_is_refused(tmp_path: Path) -> None:
    whole = table.entries(arrays())
    odd = {**whole, (SQUARE, "codes"): replace(whole[SQUARE, "codes"], order=table.COLUMNS)}
    unknown = {**whole, (BIAS, "codes"): replace(whole[BIAS, "codes"], order="?")}
    for changed, message in (
        (odd, r"the weight \[16, 16\] is stored by columns, but its kernel reads it by rows"),
        (unknown, "is stored by [?], but is read by rows"),
    ):
        path = sealed(tmp_path / "m.specc", arrays(), table.packed(changed.values()))
        with pytest.raises(IntegrityError, match=message) as raised:
            read_verified(path)
        assert raised.value.hint == table.AGAIN


def test_a_file_without_its_table_is_refused(tmp_path: Path) -> None:
    path = sealed(tmp_path / "m.specc", arrays(), b"")
    with pytest.raises(IntegrityError, match="int8 products but no table of arrays"):
        read_verified(path)


@pytest.mark.parametrize(
    "text",
    [
        b"\xff",
        b"{}",
        b"[1,2]\n",
        b'["a","codes","i8",[1.5],"rows",1]\n',
        b'["a","codes","i8",3,"rows",1]\n',
        b'[{"a":1},"codes","i8",[3],"rows",1]\n',
        b'["a","codes","i8",[3],"rows",1]\n' * 2,
        b"[" * 100_000,
    ],
)
def test_a_table_that_says_nothing_is_refused(text: bytes) -> None:
    with pytest.raises(IntegrityError, match="the table of arrays cannot be read"):
        table.unpacked(text)


def test_a_table_says_what_was_put_in() -> None:
    result = table.entries({"a": {"codes": np.arange(6, dtype=np.int8).reshape(2, 3).T}})
    assert table.unpacked(table.packed(result.values())) == result
    assert result["a", "codes"].form == "i8[3,2]" and result["a", "codes"] == Entry(
        "a",
        "codes",
        "i8",
        (3, 2),
        "rows",
        table.entries({"a": {"codes": np.array([[0, 3], [1, 4], [2, 5]], np.int8)}})["a", "codes"].checksum,
    )
