"""Launches of kernels that receive pointers: wrong shapes, strides, dtypes, files and streams raise before they run.

Refusals of a graph are in tests/catalog/test_int8_products.py, those of stored
arrays in test_int8_models.py.
"""

import hashlib
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from export_samples import layout_of, write
from int8_sites import imported, int8_site, operands
from step_sites import BITS, step_site
from step_sites import imported as step_module
from torch import Tensor

from specc.compiler.kernels.int8.gemm import GEMM_INT8_TORCH
from specc.compiler.kernels.int8.lstm import INT8_LSTM_TORCH
from specc.compiler.kernels.int8.lstm_triton import INT8_LSTM_TRITON
from specc.compiler.kernels.int8.sm80 import GEMM_INT8_SM80
from specc.compiler.kernels.kernel import Kernel
from specc.compiler.quant.artifact_sections import Kind, kind_of
from specc.compiler.quant.scheme import ITEM_BYTES, NUMPY_TYPES, Stored, StoredType
from specc.runtime.artifact import sections
from specc.runtime.artifact.artifact import read_artifact
from specc.runtime.errors import IntegrityError
from specc.runtime.support.int8_operands import check_operands, check_step

N, K = 32, 128


def operands_of(**changed: Any) -> dict[str, Any]:
    """Returns the operands of a product [6, 128] x [32, 128]."""
    tensors = {
        "x": torch.zeros(6, K, dtype=torch.int8),
        "w": torch.zeros(N, K, dtype=torch.int8),
        "offset": torch.zeros(N, dtype=torch.int32),
        "scale": torch.ones(N),
        "residual": torch.ones(6, N),
    }
    return {**tensors, **changed}


def check(tensors: dict[str, Tensor]) -> None:
    check_operands(
        ("decoder.proj",),
        tensors["x"],
        tensors["w"],
        tensors["offset"],
        (N, K),
        columns={"scale": (tensors["scale"], torch.float32)},
        tiles={"residual": (tensors["residual"], torch.float32)},
    )


def odd(tensor: Tensor) -> Tensor:
    """The same values one byte further in memory."""
    raw = torch.zeros(tensor.numel() * tensor.element_size() + 16, dtype=torch.uint8)
    step = tensor.element_size()
    return raw[step : step + tensor.numel() * step].view(tensor.dtype).view(tensor.shape)


def test_operands_that_fit_pass() -> None:
    check(operands_of())
    check(operands_of(x=torch.zeros(2, 3, K, dtype=torch.int8), residual=torch.zeros(2, 3, N)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(6, 64, dtype=torch.int8)}, "the weight has 128 columns, but its input has 64 features"),
        ({"w": torch.zeros(N, 64, dtype=torch.int8)}, "the weight has 64 columns, but its input has 128 features"),
        ({"w": torch.zeros(K, N, dtype=torch.int8)}, "the weight has 32 columns, but its input has 128 features"),
        (
            {"w": torch.zeros(31, K, dtype=torch.int8)},
            r"the weight is \[31, 128\], but the kernel is for \[32, 128\]",
        ),
        ({"w": torch.zeros(K, N, dtype=torch.int8).T}, r"w \[32, 128\] has strides \(1, 32\), rows 1 elements apart"),
        ({"w": torch.zeros(N, 2 * K, dtype=torch.int8)[:, :K]}, r"has strides \(256, 1\), rows 256 elements apart"),
        ({"x": torch.zeros(6, 2 * K, dtype=torch.int8)[:, :K]}, r"x \[6, 128\] has strides \(256, 1\)"),
        ({"offset": torch.zeros(31, dtype=torch.int32)}, r"offset is \[31\], and the kernel reads \[32\]"),
        ({"offset": torch.zeros(6, N, dtype=torch.int32)}, r"offset is \[6, 32\], and the kernel reads \[32\]"),
        ({"offset": torch.zeros(N)}, "offset is torch.float32, and the kernel reads torch.int32"),
        ({"x": torch.zeros(6, K)}, "x is torch.float32, and the kernel reads torch.int8"),
        ({"scale": torch.ones(N, dtype=torch.float16)}, "scale is torch.float16, and the kernel reads torch.float32"),
        ({"scale": torch.ones(1).expand(N)}, r"scale \[32\] has strides \(0,\)"),
        ({"residual": torch.ones(5, N)}, r"residual is \[5, 32\], and the kernel reads \[6, 32\]"),
        ({"x": odd(torch.zeros(6, K, dtype=torch.int8))}, "x is not aligned to 16 bytes: it starts 1 bytes after"),
        ({"scale": odd(torch.ones(N))}, "scale is not aligned to 16 bytes: it starts 4 bytes after"),
        ({"w": torch.zeros(N, K, dtype=torch.int8, device="meta")}, "w is on meta, and x on cpu"),
    ],
)
def test_a_launch_refuses_operands_that_do_not_fit(changed: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=f"^decoder.proj: .*{message}"):
        check(operands_of(**changed))


H = 12


def step(**changed: Any) -> dict[str, Any]:
    """Returns the operands of a step of 6 rows of 12 hidden units."""
    tensors = {
        "h": torch.zeros(6, H),
        "c": torch.zeros(6, H),
        "x": torch.zeros(6, 4 * H),
        "w": torch.zeros(4 * H, 16, dtype=torch.int8),
        "offset": torch.zeros(4 * H, dtype=torch.int32),
        "scale": torch.ones(4 * H),
        "inverse": torch.ones(H),
    }
    return {**tensors, **changed}


def test_a_step_accepts_views_of_states() -> None:
    both = torch.zeros(6, 2 * H)
    for state in (both[:, :H], both[:, H:], torch.zeros(1, H).expand(6, H)):
        check_step(("a.step",), **step(h=state, c=state), extent=(H, 16), dtype=torch.float32)
    whole = {name: torch.zeros(2, 3, width) for name, width in (("h", H), ("c", H), ("x", 4 * H))}
    check_step(("a.step",), **step(**whole), extent=(H, 16), dtype=torch.float32)
    narrow = torch.zeros(6, 2 * H, dtype=torch.bfloat16)[:, H:]
    check_step(("a.step",), **step(h=narrow, c=narrow), extent=(H, 16), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"h": torch.zeros(6, 16)}, r"h is \[6, 16\], and the kernel reads \[6, 12\]"),
        ({"h": torch.zeros(6, H, dtype=torch.bfloat16)}, "h is torch.bfloat16, and the kernel reads torch.float32"),
        (
            {"h": torch.zeros(H, 6).T},
            r"h \[6, 12\] has strides \(1, 6\), rows 1 elements apart; it must have features contig",
        ),
        ({"c": torch.zeros(6, 14)[:, :H]}, "rows 14 elements apart; it must have .* rows a multiple of 4 apart"),
        ({"c": torch.zeros(5, H)}, r"c is \[5, 12\], and the kernel reads \[6, 12\]"),
        ({"c": odd(torch.zeros(6, H))}, "c is not aligned to 16 bytes: it starts 4 bytes after"),
        ({"x": torch.zeros(6, 3 * H)}, r"x is \[6, 36\], and the kernel reads \[6, 48\]"),
        ({"x": torch.zeros(6, 96)[:, :48]}, r"strides \(96, 1\), rows 96 elements apart; it must have contiguous"),
        ({"w": torch.zeros(4 * H, H, dtype=torch.int8)}, r"w is \[48, 12\], and the kernel reads \[48, 16\]"),
        ({"w": torch.zeros(16, 4 * H, dtype=torch.int8).T}, r"w \[48, 16\] has strides \(1, 48\)"),
        ({"w": torch.zeros(4 * H, 16)}, "w is torch.float32, and the kernel reads torch.int8"),
        ({"offset": torch.zeros(H, dtype=torch.int32)}, r"offset is \[12\], and the kernel reads \[48\]"),
        ({"scale": odd(torch.ones(4 * H))}, "scale is not aligned to 16 bytes: it starts 4 bytes after"),
        ({"inverse": torch.ones(16)}, r"inverse is \[16\], and the kernel reads \[12\]"),
        ({"w": torch.zeros(4 * H, 16, dtype=torch.int8, device="meta")}, "w is on meta, and h on cpu"),
    ],
)
def test_a_step_refuses_operands_that_do_not_fit(changed: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=f"^one of a.step, b.step: .*{message}"):
        check_step(("a.step", "b.step"), **step(**changed), extent=(H, 16), dtype=torch.float32)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kernel", [INT8_LSTM_TORCH, INT8_LSTM_TRITON], ids=lambda kernel: str(kernel.name))
def test_a_step_is_checked_when_it_is_launched(kernel: Kernel, bits: Literal[8, 16], tmp_path: Path) -> None:
    label = "decoder.lstm.step and decoder.lstm.steps.recurrent.step"
    site = step_site(H, "cpu" if kernel is INT8_LSTM_TORCH else "sm90", label=label, bits=bits)
    function = step_module(kernel, site, tmp_path / f"step_refused_{kernel.name}_{bits}").int8_lstm_step
    tensors = step(scale=torch.ones(H))
    message = r"^one of decoder.lstm.step, decoder.lstm.steps.recurrent.step: scale is \[12\]"
    with pytest.raises(ValueError, match=message):
        function(*tensors.values())


def test_a_kernel_of_several_nodes_names_them_all(tmp_path: Path) -> None:
    """One file computes all products of a shape: whichever node called is in the message."""
    labels = " and ".join((*(f"decoder.cross.{word} + {word}.biased" for word in "qkv"), "head.logits"))
    site = replace(int8_site("plain", N, K), label=labels)
    function = vars(imported(GEMM_INT8_TORCH, site, tmp_path))["int8_linear_f32"]
    x, *others = operands(site, (6,), 0)
    assert function(x, *others).shape == (6, N)
    with pytest.raises(
        ValueError, match=r"^one of decoder.cross.q, decoder.cross.k, decoder.cross.v, head.logits: the weight"
    ):
        function(x[:, :64], *others)


def test_a_status_is_never_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error status of can_implement, initialize or the launch reaches the caller, with the name of the node."""
    site = int8_site("plain", N, K, "sm86")
    module = imported(GEMM_INT8_SM80, site, tmp_path)
    name = GEMM_INT8_SM80.render(site).function
    calls: list[int] = []

    class Library:
        """Stands for the compiled kernel."""

        def __getattr__(self, called: str) -> Callable[..., object]:
            if called == f"{name}_workspace":
                return lambda rows: 0
            if called == f"{name}_status":
                return lambda status: f"status {status}".encode()
            return lambda rows, *pointers: calls.append(rows) or 7

    class Stream:
        cuda_stream = 0

    monkeypatch.setattr(module, "native", Library)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    with pytest.raises(RuntimeError, match=r"^part.up: CUTLASS refuses 6 rows: status 7$"):
        module.launch(*operands(site, (6,), 0), torch.empty(6, N))
    assert calls == [6]


def test_the_launcher_runs_on_the_current_stream(tmp_path: Path) -> None:
    """No stream of its own: what was queued before is done before, and memory is Torch's."""
    text = (tmp_path / "k").joinpath
    site = int8_site("plain", N, K, "sm90")
    imported(GEMM_INT8_SM80, site, tmp_path / "k")
    symbol = GEMM_INT8_SM80.render(site).module
    launcher, source = text(f"{symbol}.py").read_text(), text(f"{symbol}.cu").read_text()
    assert launcher.count("torch.cuda.current_stream(x.device).cuda_stream") == 1
    assert "call.initialize(given, workspace, stream)" in source and "call.run(stream)" in source
    for word in ("cudaMalloc", "cudaFree", "cudaStreamCreate", "cudaMemcpy", "<<<"):
        assert word not in source


def test_every_stored_dtype_has_its_bytes_its_array_and_its_section() -> None:
    for dtype in get_args(StoredType):
        stored = Stored("value", dtype, (3, 5))
        array = np.zeros(stored.shape, stored.numpy_dtype())
        assert array.nbytes == stored.bytes == 15 * ITEM_BYTES[dtype]
        assert sections.ITEM_BYTES[kind_of(stored)] == ITEM_BYTES[dtype]
    assert set(NUMPY_TYPES) == set(ITEM_BYTES) == set(get_args(StoredType))
    kinds = {kind_of(Stored("value", dtype, (1,))) for dtype in get_args(StoredType)}
    assert len(kinds) == len(get_args(StoredType)) and Kind.SPEC not in kinds


@pytest.mark.parametrize(("held", "claimed"), [(Kind.BF16, Kind.F16), (Kind.F16, Kind.BF16), (Kind.F32, Kind.I32)])
def test_bits_of_one_dtype_are_never_read_as_another(held: Kind, claimed: Kind, tmp_path: Path) -> None:
    """A header that says f16 of bf16 bits, sealed anew, is refused: the spec says what each section is."""
    path = tmp_path / "model.specc"
    write(path)
    data = bytearray(path.read_bytes())
    count = struct.unpack_from("<I", data, 12)[0]
    entries = [80 + 44 * i for i in range(count)]
    at = next(entry for entry in entries if data[entry] == held)
    data[at] = claimed
    end = 80 + 44 * count
    data[end : end + 32] = hashlib.sha256(data[:end]).digest()
    path.write_bytes(data)
    with pytest.raises(IntegrityError):
        read_artifact(path, layout_of)
