"""Attention over short sequences: what the kernels take and write, in Triton's interpreter, and as machine code."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_sites import attention_site, several
from kernel_sites import (
    DTYPES,
    GUARD,
    check_clean,
    check_guards,
    check_outputs,
    empty,
    imported,
    interpret,
    machine_code,
    written,
)
from torch import Tensor

from specc.compiler.kernels.attention.short import (
    SHORT_CAUSAL,
    SHORT_CAUSAL_GRAD,
    SHORT_SEEN,
    SHORT_SEEN_GRAD,
    PairTile,
    ShortAttention,
    pair_tile,
)
from specc.compiler.kernels.kernel import Site, symbol
from specc.runtime.verify.judge import Judge, inputs_of

ROOT = Path(__file__).parents[3]
KINDS = ("causal", "seen", "cross")
WAYS = [(kind, backward) for kind in KINDS for backward in (False, True)]
POLY = (8, 8, 32)


def kernel_of(site: Site, tile: PairTile | None = None) -> ShortAttention:
    """The kernel for a site."""
    every = (SHORT_CAUSAL, SHORT_CAUSAL_GRAD, SHORT_SEEN, SHORT_SEEN_GRAD)
    return replace(next(kernel for kernel in every if isinstance(site.node.op, kernel.computes)), tile=tile)


# --- what they take and write ---


def test_random_sites_render_as_clean_python(tmp_path: Path) -> None:
    rng = random.Random(4)
    for i in range(60):
        groups = rng.choice((1, 2, 3, 16))
        shape = (groups * rng.choice((1, 2, 7)), groups, rng.choice((8, 16, 24, 32, 64, rng.randint(1, 64))))
        kind, backward = rng.choice(WAYS)
        target, dtype = rng.choice(("sm80", "sm90", "sm120")), rng.choice(("bf16", "f16"))
        site = attention_site(shape, backward, target, dtype, kind, rng.randint(1, 128))
        written(kernel_of(site), site, tmp_path / f"site_{i}")
    check_clean(tmp_path, 116)


@pytest.mark.parametrize(("kind", "backward"), WAYS)
def test_refusals_say_why_with_numbers(kind: str, backward: bool) -> None:
    def reason(shape: tuple[int, int, int] = POLY, context: int | None = 30, **words: str) -> str | None:
        site = attention_site(shape, backward, kind=kind, context=context, **words)  # type: ignore[arg-type]
        return kernel_of(site).rejects(site)

    assert reason() is None and reason((7, 1, 9), 128) is None and reason((8, 2, 128), 1) is None
    assert reason(dtype="f32") == "computes in bf16 or f16, not in f32"
    assert reason((4, 4, 129)) == "takes heads of at most 128 channels; these have 129"
    assert reason(context=129) == "accepts at most 128 tokens; there may be 129"
    assert reason(context=None) == "accepts at most 128 tokens; the number of tokens is unknown"
    narrow = reason((8, 8, 128), 128, target="sm86")
    room = "needs 163,840 bytes of shared memory for 128 tokens of 128 channels; sm86 has 101,376"
    assert narrow == (room if backward else None)
    room = "needs 114,688 bytes of shared memory for 128 tokens of 64 channels; sm86 has 101,376"
    assert reason((8, 2, 64), 128, target="sm86") == (room if backward else None)
    assert reason((8, 8, 64), 128, target="sm86") is None


def test_it_is_first_by_rule_only_where_sequences_are_short() -> None:
    ranks = {context: SHORT_CAUSAL.rank(attention_site(POLY, context=context)) for context in (1, 30, 64, 65, 128)}
    assert ranks == {1: 0, 30: 0, 64: 0, 65: 7, 128: 7}


def test_names_tell_self_and_cross_apart() -> None:
    results = [symbol(attention_site(POLY, backward, kind=kind)) for kind, backward in WAYS]
    words = ("causal_attention", "seen_attention", "cross_attention")
    names = [f"{word}{grad}" for word in words for grad in ("", "_grad")]
    assert results == [(name, f"{name}__h8_g8_c32") for name in names]


@pytest.mark.parametrize(("kind", "backward"), WAYS)
def test_tiles_to_measure_are_distinct_and_begin_with_the_rule(kind: str, backward: bool) -> None:
    for context, channels in ((30, 32), (30, 128), (64, 64), (128, 64)):
        site = attention_site((8, 4, channels), backward, kind=kind, context=context)
        tiles = [kernel.tile for kernel in kernel_of(site).variants(site)]  # type: ignore[attr-defined]
        assert len(set(tiles)) == len(tiles) > 4 and tiles[0] == pair_tile(site)
    assert str(PairTile(1, 2, 1)) == "1 pair, 2 warps, 1 stage"


def test_a_measured_tile_replaces_the_rule(tmp_path: Path) -> None:
    site = attention_site(POLY, context=30)
    (path,) = written(kernel_of(site, PairTile(4, 2, 3)), site, tmp_path / "measured")
    assert "\nROWS, KEYS, WIDTH, PAIRS, WARPS, STAGES = 32, 32, 32, 4, 2, 3\n" in path.read_text()


@pytest.mark.parametrize(("kind", "backward"), WAYS)
def test_ops_state_their_types_without_a_gpu(kind: str, backward: bool, tmp_path: Path) -> None:
    site = attention_site(POLY, backward, kind=kind, context=30)
    op = getattr(imported(kernel_of(site), site, tmp_path / f"fake_short_{kind}_{backward}"), symbol(site)[0])
    sizes = {"B": 3, "T": 5, "S": 7}
    check_outputs(op(*(empty(type, **sizes) for type in site.inputs)), site, **sizes)
    with pytest.raises(ValueError, match=r"is torch.bfloat16 .* on cpu; expected torch.bfloat16 .* on one GPU"):
        op(*(empty(type, "cpu", **sizes) for type in site.inputs))


# --- Triton's interpreter ---

# Sequences, queries and keys; the tokens of q, k and v stand further apart where told.
LENGTHS = ((3, 1, 1, 0), (2, 7, 2, 16), (2, 30, 31, 0), (1, 31, 30, 8))
LONG = ((1, 100, 128, 0), (2, 128, 64, 8))
Case = tuple[str, bool, tuple[int, int, int], int, PairTile | None]
CASES: list[Case] = [
    *((kind, backward, POLY, 31, None) for kind, backward in WAYS),
    *((kind, backward, (4, 2, 16), 31, PairTile(3, 1, 1)) for kind, backward in WAYS),
    *((kind, backward, (3, 1, 24), 31, PairTile(2, 1, 1)) for kind, backward in WAYS),
    *((kind, backward, (2, 2, 64), 128, None) for kind, backward in WAYS),
]


def site_of(case: Case) -> Site:
    kind, backward, shape, context, _ = case
    return attention_site(shape, backward, "sm90", "f16", kind, context)  # the interpreter's dot is wrong in bf16


def lengths_of(case: Case) -> list[tuple[int, int, int, int]]:
    """Those that a case has; a sequence that is attended to causally is as long as its queries."""
    result = LONG if case[3] > 31 else LENGTHS
    return [(b, t, t, apart) for b, t, _, apart in result] if case[0] != "cross" else list(result)


def short_inputs(site: Site, b: int, t: int, s: int, seed: int, apart: int = 0) -> list[Tensor]:
    """Random inputs that belong together. Of several sequences the last has no key that is seen, and the one before
    pads at its end; `apart` are elements between the heads of a token and those of the next."""
    generator = torch.Generator().manual_seed(seed)
    names = ["dy", "q", "k", "v", "y", "lse", "seen"] if len(site.inputs) > 4 else ["q", "k", "v", "seen"]
    values = []
    for name, type in zip(names, site.inputs, strict=False):
        shape = [{"B": b, "T": t, "S": s}.get(dim, dim) for dim in type.shape]  # type: ignore[call-overload]
        if type.dtype == "bool":
            seen = torch.ones(shape, dtype=torch.bool)
            seen[: max(1, b - 1), shape[1] - shape[1] // 3 :] = False
            seen[0, torch.randperm(shape[1], generator=generator)[: shape[1] // 4]] = False
            seen[b - 1 :] = b == 1
            values.append(seen)
            continue
        value = torch.randn(shape, generator=generator).to(DTYPES[type.dtype])
        if apart and name in ("q", "k", "v"):
            wide = torch.full((*shape[:2], shape[2] * shape[3] + apart), torch.nan, dtype=value.dtype)
            wide[..., : -apart or None] = value.flatten(2)
            value = wide[..., : -apart or None].unflatten(2, tuple(shape[2:]))
        values.append(value)
    return list(site.node.op.belonging(values))


def expected(site: Site, inputs: list[Tensor]) -> list[Tensor]:
    """The outputs in float64, of the inputs as they are."""
    wide = (value.double() if value.is_floating_point() else value for value in inputs)
    return list(several(site.node.op.reference(*wide)))


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Any]:
    """The contents that the interpreter leaves in the buffers of each case and its lengths."""
    folder = tmp_path_factory.mktemp("interpreted_short")
    runs, keys = [], []
    for i, case in enumerate(CASES):
        site = site_of(case)
        module = imported(kernel_of(site, case[4]), site, folder / f"interpreted_short_{i}").__name__
        for k, (b, t, s, apart) in enumerate(lengths_of(case)):
            given = short_inputs(site, b, t, s, k, apart)
            wanted = expected(site, given)
            dtypes = [DTYPES[type.dtype] for type in site.node.types]
            pairs = zip(wanted, dtypes, strict=True)
            buffers = [torch.full((want.numel() + 2 * GUARD,), torch.nan, dtype=dtype) for want, dtype in pairs]
            runs.append((str(folder), module, given, buffers, [want.shape[-1] for want in wanted]))
            keys.append((i, k))
    return dict(zip(keys, interpret(folder, runs), strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: "-".join(map(str, CASES[i])))
def test_interpreted_kernels_give_the_reference(index: int, interpreted: dict[tuple[int, int], Any]) -> None:
    site = site_of(CASES[index])
    for k, (b, t, s, apart) in enumerate(lengths_of(CASES[index])):
        buffers, unchanged = interpreted[index, k]
        assert unchanged, "an input was written"
        wanted = expected(site, short_inputs(site, b, t, s, k, apart))
        for name, buffer, want in zip(site.node.op.output_labels, buffers, wanted, strict=True):
            check_guards(buffer, name)
            got = buffer[GUARD : buffer.numel() - GUARD].view(want.shape).double()
            # half a unit of f16 where a result is stored, and of each weight and its blame before they are multiplied
            exact = name == "lse"
            tolerance = 4e-6 * (1 + want.abs()) if exact else 2.0**-11 * (want.abs() + 4 * want.abs().max()) + 2.0**-14
            excess = ((got - want).abs() / tolerance).max()
            assert excess <= 1, f"{name} of {b} x {t} to {s} tokens is off by {excess:.3g} tolerances"
            if name in ("y", "dq", "lse") and len(site.inputs) % 3 == 1 and b > 1:
                assert not (got[-1] != 0).any()  # the last sequence sees nothing


@pytest.mark.interpret
def test_what_a_sharp_weight_leaves_is_not_lost_in_the_rounding_of_y(tmp_path: Path) -> None:
    """Where nearly all weight is on one key, dp - sum(p dp) is far less than dp, and than what y is rounded by. With y
    for the sum, errors were half of the eager chain's; without, a quarter."""
    site = attention_site(POLY, True, dtype="f16", kind="seen", context=30)
    dy, q, *others = inputs_of(site, {"B": 2, "T": 29}, "cpu", seed=3)
    judge = Judge.of(site, site.node.op.belonging([dy, 4 * q, *others]))
    module = imported(kernel_of(site), site, tmp_path / "interpreted_sharp").__name__
    buffers = [torch.full((want.numel() + 2 * GUARD,), torch.nan, dtype=torch.float16) for want in judge.exact]
    ((buffers, unchanged),) = interpret(tmp_path, [(str(tmp_path), module, judge.inputs, buffers, [POLY[-1]] * 3)])
    results = [buffer[GUARD:-GUARD].view(want.shape) for buffer, want in zip(buffers, judge.exact, strict=True)]
    dq, dk, dv = judge.errors(results)
    assert unchanged and max(dq.rms, dk.rms) < 0.35 and dv.rms < 0.5 and max(dq.peak, dk.peak, dv.peak) < 0.5


# --- machine code ---


def compiled(site: Site, folder: Path, tile: PairTile | None = None) -> Any:
    element = {"bf16": "*bf16", "f16": "*fp16"}[site.inputs[0].dtype]

    def type_of(name: str) -> str:
        tensor, _, kind = name.rpartition("_")
        if kind == "ptr":
            return {"lse": "*fp32", "seen": "*i1"}.get(tensor, element)
        return "i32" if name in ("B", "T", "S") or kind == "STRIDE" else "constexpr"

    return machine_code(imported(kernel_of(site, tile), site, folder), site, type_of)


@pytest.mark.parametrize(("kind", "backward"), WAYS)
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm120"])
def test_heads_are_loaded_by_sixteen_bytes_and_multiplied_on_tensor_cores(
    target: str, kind: str, backward: bool, tmp_path: Path
) -> None:
    site = attention_site(POLY, backward, target, kind=kind, context=30)
    code = compiled(site, tmp_path / f"short_{target}_{kind}_{backward}")
    ptx = code.asm["ptx"]
    assert "mma.sync" in ptx and ".f64" not in ptx and "atom" not in ptx and ".local" not in ptx
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
    assert code.metadata.shared <= 8192


@pytest.mark.parametrize("target", ["sm86", "sm90"])
@pytest.mark.parametrize(("context", "shape"), [(128, (4, 4, 64)), (1, (3, 3, 8)), (64, (2, 1, 128))])
def test_other_sizes_compile(context: int, shape: tuple[int, int, int], target: str, tmp_path: Path) -> None:
    for kind in ("causal", "cross"):
        site = attention_site(shape, True, target, "f16", kind, context)
        code = compiled(site, tmp_path / f"short_{target}_{context}_{kind}")
        assert code.metadata.shared <= site.target.shared_memory


def test_tiles_to_measure_compile(tmp_path: Path) -> None:
    site = attention_site(POLY, True, kind="cross", context=30)
    for i, kernel in enumerate(kernel_of(site).variants(site)):
        tile = kernel.tile  # type: ignore[attr-defined]
        code = compiled(site, tmp_path / f"short_tile_{i}", tile)
        assert code.metadata.shared <= site.target.shared_memory and code.metadata.num_warps == tile.warps
