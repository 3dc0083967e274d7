"""Norm, rotary embedding and gain: kernels in Torch, in Triton's interpreter, and as machine code."""

import math
import random
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from head_sites import PARTS, SHAPES, buffers, columns, expected, head_inputs, head_site, several, totals
from kernel_sites import (
    DTYPES,
    check_clean,
    check_guards,
    check_outputs,
    empty,
    imported,
    inside,
    interpret,
    machine_code,
    written,
)
from tiny_models import ATTENTION, tiny

from specc.compiler import kernels
from specc.compiler.catalog import catalog
from specc.compiler.ir.types import TensorType
from specc.compiler.kernels.kernel import Kernel, Site, missing, symbol
from specc.compiler.kernels.norm_rope.norm_rope import NORM_ROPE_TRITON, HeadTile, head_tile
from specc.compiler.kernels.norm_rope.torch import NORM_ROPE_TORCH
from specc.compiler.ops.norm_rope import HeadRotation
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.positions import Rope
from specc.compiler.targets import TARGETS
from specc.runtime.model.load import instantiate

WAYS = [(parts, backward) for parts in PARTS for backward in (False, True)]
NAMED = [f"{parts}{'-grad' if backward else ''}" for parts, backward in WAYS]


def random_site(rng: random.Random) -> Site:
    channels = rng.choice((32, 64, 128, 2 * rng.randint(16, 64)))
    pairs = rng.choice((channels // 2, rng.randint(1, channels // 2)))
    return head_site(
        rng.choice(list(PARTS)),
        (rng.choice((1, 4, 8, 12, rng.randint(1, 40))), channels, pairs),
        rng.random() < 0.5,
        rng.choice(("cpu", "sm80", "sm90", "sm120")),
        rng.choice(("bf16", "f16", "f32")),
        rng.choice((("T",), ("B", "T"), (3, "B", "T"))),
        rng.choice((1e-6, 1e-5)),
    )


def kernel_of(site: Site) -> Kernel:
    return NORM_ROPE_TRITON if "gpu" in site.target.features else NORM_ROPE_TORCH


def with_tile(tile: HeadTile | None) -> Kernel:
    return replace(NORM_ROPE_TRITON, tile=tile)


# --- what they take and write ---


def test_random_sites_render_as_clean_python(tmp_path: Path) -> None:
    rng = random.Random(4)
    for i in range(80):
        site = random_site(rng)
        written(kernel_of(site), site, tmp_path / f"site_{i}")
    check_clean(tmp_path)


def test_names_tell_parts_and_sizes() -> None:
    results = {way: symbol(head_site(way[0], backward=way[1])) for way in WAYS}
    assert results["norm_gain", False] == ("norm_rotary_gain", "norm_rotary_gain__h8_c64_r8")
    assert results["norm", True] == ("norm_rotary_grad", "norm_rotary_grad__h8_c64_r8")
    assert results["gain", False][0] == "rotary_gain" and results["bare", False][0] == "rotary"
    assert len(set(results.values())) == len(WAYS)
    assert results["weight", False][0] == "norm_w_rotary"
    assert results["weight_add_gain", True][0] == "norm_w_add_rotary_gain_grad"
    assert symbol(head_site("norm", eps=1e-5))[0] == "norm1em05_rotary"
    assert symbol(head_site("norm", eps=0.25))[0] == "norm0p25_rotary"


def test_every_target_has_one_kernel_for_it() -> None:
    results = [kernel for kernel in catalog(kernels, Kernel).values() if kernel.computes is HeadRotation]
    for target in TARGETS:
        for parts, backward in WAYS:
            site = head_site(parts, backward=backward, target=target, dtype=TARGETS[target].dtype)
            assert [k for k in results if not missing(k, site.target) and not k.rejects(site)] == [kernel_of(site)]


def test_refusals_say_why_with_numbers() -> None:
    reason = "on sm90, Torch would run each part as a separate kernel, not fused"
    assert NORM_ROPE_TORCH.rejects(head_site()) == reason
    rejects = NORM_ROPE_TRITON.rejects
    assert rejects(head_site(dtype="f64")) == "reads x in bf16 or f16 or f32, not in f64"
    site = head_site()
    x, _, sin, gain = site.inputs
    narrow = replace(site, inputs=(x, TensorType(("T", 8), "bf16"), sin, gain))
    assert rejects(narrow) == "reads cos in f32, not in bf16"
    reason = "holds a head in registers, at most 4096 channels; these have 4098"
    assert rejects(head_site(sizes=(1, 4098, 4))) == reason
    reason = "sums the gradients of at most 256 gains; there are 257"
    assert rejects(head_site(sizes=(257, 64, 8), backward=True)) == reason
    assert rejects(head_site("weight", (257, 64, 8), True)) is None
    assert rejects(head_site("norm", (257, 64, 8), True)) is None and rejects(head_site(sizes=(257, 64, 8))) is None


@pytest.mark.parametrize(
    ("block", "tile"),
    [
        (1, HeadTile(1024, 4, 4)),
        (32, HeadTile(32, 4, 4)),
        (64, HeadTile(16, 4, 4)),
        (1024, HeadTile(1, 4, 4)),
        (4096, HeadTile(1, 4, 16)),
    ],
)
def test_tiles_follow_the_width(block: int, tile: HeadTile) -> None:
    assert head_tile(block) == tile


def test_tiles_to_measure_are_distinct_and_have_the_rules() -> None:
    for sizes in (*SHAPES.values(), (2, 4096, 5)):
        for parts, backward in WAYS:
            site = head_site(parts, sizes, backward)
            tiles = [kernel.tile for kernel in NORM_ROPE_TRITON.variants(site)]  # type: ignore[attr-defined]
            assert len(set(tiles)) == len(tiles) > 3
            block = 1 << ((sizes[2] if 2 * sizes[2] == sizes[1] else sizes[1]) - 1).bit_length()
            assert head_tile(block) in tiles and all(tile.rows * block >= 32 * tile.warps for tile in tiles)


def test_one_is_told_as_one() -> None:
    assert str(HeadTile(1, 1, 1)) == "1 head, 1 sequence, 1 warp"
    assert str(HeadTile(16, 4, 2)) == "16 heads, 4 sequences, 2 warps"


def test_a_measured_tile_replaces_the_rule(tmp_path: Path) -> None:
    (path,) = written(with_tile(HeadTile(8, 2, 1)), head_site(), tmp_path / "measured")
    assert "\nROWS, BLOCK, SEQUENCES, WARPS = 8, 64, 2, 1\n" in path.read_text()


def test_more_sequences_than_a_second_axis_has(tmp_path: Path) -> None:
    """CUDA's grids have 2 ** 31 - 1 programs on the first axis, and 65,535 on each other."""
    for parts, backward in WAYS:
        site = head_site(parts, SHAPES["golf"], backward)
        module = imported(with_tile(HeadTile(4, 1, 1)), site, tmp_path / f"many_{parts}_{backward}")
        first, *others = module.grid_of(70_000 * 3, 3)
        assert first * math.prod(others) == 70_000 * 6 and all(count <= 65_535 for count in others)


# --- the op ---


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", SHAPES)
def test_the_reference_is_that_of_its_parts(name: str, parts: str) -> None:
    site = head_site(parts, SHAPES[name], rows=("B", "T"))
    x, cos, sin, *learned = (value.double() for value in head_inputs(site, 2, 5, 3))
    eps, gain, neighbors, weight = PARTS[parts]
    h = x if eps is None else x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    h = h * Pointwise((weight,), ("w",)).reference(learned[0]) if weight else h
    turned = Rope(neighbors).reference(h, cos, sin)
    wanted = Pointwise(("q * g",), ("q", "g")).reference(turned, learned[-1]) if gain else turned
    torch.testing.assert_close(site.node.op.reference(x, cos, sin, *learned), wanted, rtol=1e-13, atol=1e-13)


def test_operations_are_counted_by_parts() -> None:
    sizes = {"B": 3, "T": 5}
    count = 3 * 5 * 8 * 64
    turns = 3 * 3 * 5 * 8 * 16
    counts = {"norm_gain": (5, 7), "norm": (4, 7), "gain": (1, 3), "bare": (0, 0), "weight": (5, 11)}
    for parts, (forward, backward) in counts.items():
        for site, each in ((head_site(parts), forward), (head_site(parts, backward=True), backward)):
            assert site.node.op.flops(site.inputs, site.node.types, sizes) == turns + each * count


# --- plain Torch ---


@pytest.mark.parametrize(("parts", "backward"), WAYS, ids=NAMED)
@pytest.mark.parametrize("name", SHAPES)
def test_plain_torch_gives_the_reference(name: str, parts: str, backward: bool, tmp_path: Path) -> None:
    site = head_site(parts, SHAPES[name], backward, "cpu", "f32")
    module = imported(NORM_ROPE_TORCH, site, tmp_path / f"plain_{name}_{parts}_{backward}")
    function = getattr(module, symbol(site)[0])
    for rows in (("T",), ("B", "T"), (2, "B", "T")):
        shaped = head_site(parts, SHAPES[name], backward, "cpu", "f32", rows)
        inputs = [value.double() for value in head_inputs(shaped, 3, 4, 1)]
        before = [value.clone() for value in inputs]
        result, wanted = several(function(*inputs)), expected(shaped, inputs)
        assert len(result) == len(wanted)
        for have, want in zip(result, wanted, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)
        assert all(map(torch.equal, inputs, before))


@pytest.mark.parametrize(("parts", "backward"), WAYS, ids=NAMED)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_plain_torch_keeps_a_narrow_dtype(dtype: str, parts: str, backward: bool, tmp_path: Path) -> None:
    site = head_site(parts, backward=backward, target="cpu", dtype=dtype)
    module = imported(NORM_ROPE_TORCH, site, tmp_path / f"narrow_{dtype}_{parts}_{backward}")
    inputs = head_inputs(site, 2, 6, 1)
    for have, want in zip(several(getattr(module, symbol(site)[0])(*inputs)), expected(site, inputs), strict=True):
        assert have.dtype == DTYPES[dtype]
        assert (have.double() - want).norm() / want.norm() < torch.finfo(DTYPES[dtype]).eps


# --- the custom op, without a GPU ---


@pytest.mark.parametrize(("parts", "backward"), WAYS, ids=NAMED)
def test_fakes_have_the_shapes_and_dtypes_of_the_node(parts: str, backward: bool, tmp_path: Path) -> None:
    for i, rows in enumerate(((0,), (5,), (2, 3), (2, 0, 3))):
        site = head_site(parts, backward=backward, rows=rows)
        module = imported(NORM_ROPE_TRITON, site, tmp_path / f"fake_{parts}_{backward}_{i}")
        inputs = [*map(empty, site.inputs)]
        if not backward and inputs[0].dim() == 4:
            inputs[0] = inputs[0].transpose(0, 1).contiguous().transpose(0, 1)
        check_outputs(getattr(module, symbol(site)[0])(*inputs), site)


def test_wrong_inputs_are_refused_with_names_and_numbers(tmp_path: Path) -> None:
    site = head_site(sizes=(4, 32, 8))
    op = imported(NORM_ROPE_TRITON, site, tmp_path / "checked_heads").norm_rotary_gain
    x, cos, sin, gain = head_inputs(site, 2, 3, 1)
    with pytest.raises(ValueError) as caught:
        op(x, cos, sin, gain)  # every check passes but the device
    assert str(caught.value) == (
        "blocks.*.attention.q.rope: x is torch.bfloat16 [2, 3, 4, 32], strides (384, 128, 32, 1), on cpu; expected "
        "evenly spaced tokens of contiguous heads, 16-byte aligned torch.bfloat16 [2, 3, 4, 32] on one GPU"
    )
    with pytest.raises(ValueError, match=r"x is torch.float32 \[2, 3, 4, 16\].*expected .*bfloat16 \[2, 3, 4, 32\]"):
        op(x.float()[..., :16], cos, sin, gain)
    with pytest.raises(ValueError, match=r"x is .*\[2, 3, 4, 32\].*expected .*\[2, 2, 4, 32\]"):
        op(x, cos[:2], sin[:2], gain)
    for wrong in (x[0, 0], x[0, 0, 0], x[0, 0, 0, 0]):
        with pytest.raises(ValueError, match=r"x is .*expected .*\[3, 4, 32\]"):
            op(wrong, cos, sin, gain)


def test_a_group_is_one_op_each_way_when_it_is_compiled(tmp_path: Path) -> None:
    from torch._dynamo.backends.common import aot_autograd

    heads = {**ATTENTION, "head_dim": 32, "qk_norm": {"gain": 1.5}, "rope": {"dims": 16}}
    points = ({"blocks.*.attention": ["q.norm", "q.rope", "q.gain"]}, {"blocks.*.attention": ["k.norm", "k.rope"]})
    loaded = instantiate(tiny(layers=(heads,), fuse=points, targets=("sm90",)), "sm90", tmp_path / "compiled_group")
    source = sys.modules[type(loaded.model).__module__]
    seen: list[list[str]] = []

    def record(graph: torch.fx.GraphModule, _: object) -> Any:
        calls = [str(node.target).split(".") for node in graph.graph.nodes if node.op == "call_function"]
        seen.append([name[1] for name in calls if len(name) == 3])
        return make_boxed_func(graph.forward)

    def both(q: torch.Tensor, k: torch.Tensor, gain: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return source.FusedQ.apply(q, cos, sin, gain) + source.FusedK.apply(k, cos, sin)

    x = torch.empty(3, 7, 2, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
    gain = torch.empty(2, 1, dtype=torch.bfloat16, device="meta", requires_grad=True)
    compiled = torch.compile(both, backend=aot_autograd(fw_compiler=record, bw_compiler=record), fullgraph=True)
    compiled(x, x, gain, *(torch.empty(7, 8, device="meta") for _ in range(2))).sum().backward()
    ops = [sorted(name for name in names if "rotary" in name) for names in seen]
    assert ops == [
        ["norm_rotary__h2_c32_r8", "norm_rotary_gain__h2_c32_r8"],
        ["norm_rotary_gain_grad__h2_c32_r8", "norm_rotary_grad__h2_c32_r8"],
    ]
    assert x.grad is not None and gain.grad is not None and gain.grad.shape == (2, 1)


# --- Triton's interpreter ---

# Some with heads that no tile divides, some with more sequences than a program takes; x apart from its neighbours.
ROWS = ((1, 1, 0), (5, 3, 16), (1, 21, 0))
TILES = {"rule": None, "small": HeadTile(2, 1, 1), "large": HeadTile(128, 3, 4)}
Case = tuple[str, str, bool, str, str]
CASES: list[Case] = [
    *(("golf", parts, backward, "f32", "rule") for parts, backward in WAYS),
    *((name, "norm_gain", backward, "f32", "rule") for name in list(SHAPES)[1:] for backward in (False, True)),
    *(("golf", "norm_gain", backward, "bf16", "rule") for backward in (False, True)),
    *((name, "norm_gain", True, "f32", tile) for name, tile in (("golf", "small"), ("gpt2", "large"))),
    *(("gpt2", "bare", backward, "f32", "small") for backward in (False, True)),
    *((name, "weight_add_gain", backward, "f32", "rule") for name in ("gpt2", "most") for backward in (False, True)),
    ("odd_whole", "weight", True, "bf16", "small"),
]


def site_of(case: Case) -> Site:
    name, parts, backward, dtype, _ = case
    return head_site(parts, SHAPES[name], backward, dtype=dtype)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Case, int], Any]:
    """The contents that the interpreter leaves in the buffers of each case and number of sequences and tokens."""
    folder = tmp_path_factory.mktemp("interpreted_heads")
    runs, keys, widths = [], [], []
    for i, case in enumerate(CASES):
        site = site_of(case)
        module = imported(with_tile(TILES[case[4]]), site, folder / f"interpreted_heads_{i}")
        for k, (b, t, apart) in enumerate(ROWS):
            given = head_inputs(site, b, t, k, apart=apart)
            widths.append(columns(site, module, b, t))
            runs.append((str(folder), module.__name__, given, buffers(site, module, b, t), widths[-1]))
            keys.append((case, k))
    left = interpret(folder, runs)
    return {key: (outputs, width, same) for key, width, (outputs, same) in zip(keys, widths, left, strict=True)}


@pytest.mark.interpret
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_interpreted_kernels_give_the_reference(case: Case, interpreted: dict[tuple[Case, int], Any]) -> None:
    site = site_of(case)
    for k, (b, t, apart) in enumerate(ROWS):
        outputs, widths, unchanged = interpreted[case, k]
        assert unchanged, "an input was written"
        inputs = head_inputs(site, b, t, k, apart=apart)
        wanted = expected(site, inputs)
        results = [inside(buffer, width).double() for buffer, width in zip(outputs, widths, strict=True)]
        sums = totals(site, results, inputs)
        for i, (buffer, got, want) in enumerate(zip(outputs, sums, wanted, strict=True)):
            check_guards(buffer, f"output {i}")
            rounding = 2.0**-7 if buffer.dtype == torch.bfloat16 else 0.0  # the interpreter rounds it towards 0
            scale = want.abs().max() if i == 0 else (b * t * site.inputs[0].shape[-2]) ** 0.5 + want.abs().max()
            tolerance = rounding * want.abs() * 1.001 + 4e-6 * (want.abs() + scale)
            excess = ((got.view(want.shape) - want).abs() / tolerance).max()
            assert excess <= 1, f"output {i} of {b} x {t} tokens is off by {excess:.3g} tolerances"


# --- gradients that are written into a part of a wider tensor ---

INTO = [("golf", parts, (16, 8)) for parts in PARTS] + [("odd_part", "norm_gain", (8, 0)), ("gpt2", "norm", (0, 24))]


@pytest.mark.parametrize(("name", "parts", "into"), INTO, ids=str)
def test_plain_torch_writes_a_part(name: str, parts: str, into: tuple[int, int], tmp_path: Path) -> None:
    site = head_site(parts, SHAPES[name], True, "cpu", "f32", into=into)
    module = imported(NORM_ROPE_TORCH, site, tmp_path / f"part_{name}_{parts}")
    inputs = [value.double() for value in head_inputs(site, 2, 5, 1)]
    wanted = expected(site, inputs)
    results = several(getattr(module, symbol(site)[0])(*inputs))
    assert results[0] is inputs[-1]
    for have, want in zip(results, wanted, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


@pytest.mark.interpret
def test_interpreted_kernels_write_a_part_and_nothing_else(tmp_path: Path) -> None:
    runs, cases = [], []
    for i, (name, parts, into) in enumerate(INTO):
        for dtype in ("f32", "bf16")[: 1 + (parts == "norm_gain")]:
            site = head_site(parts, SHAPES[name], True, dtype=dtype, into=into)
            module = imported(NORM_ROPE_TRITON, site, tmp_path / f"interpreted_part_{i}_{dtype}")
            for k, (b, t, apart) in enumerate(ROWS):
                *given, whole = head_inputs(site, b, t, k, apart=apart)
                outputs, widths = buffers(site, module, b, t), columns(site, module, b, t)
                inside(outputs[0], widths[0]).copy_(whole.flatten(0, -2))
                runs.append((str(tmp_path), module.__name__, given, outputs, widths))
                cases.append((site, given, whole, widths))
    for (site, given, whole, widths), (outputs, unchanged) in zip(cases, interpret(tmp_path, runs), strict=True):
        assert unchanged, "an input was written"
        results = [inside(buffer, width).double() for buffer, width in zip(outputs, widths, strict=True)]
        wanted = expected(site, (*given, whole))
        features = math.prod(given[0].shape[-2:])
        at = site.node.op.at  # type: ignore[attr-defined]
        rest = [slice(0, at), slice(at + features, None)]
        for i, (got, want) in enumerate(zip(totals(site, results, given), wanted, strict=True)):
            check_guards(outputs[i], f"output {i}")
            got = got.view(want.shape)
            if i == 0:
                assert all(torch.equal(got[..., part], want[..., part]) for part in rest)
            rounding = 2.0**-7 if outputs[i].dtype == torch.bfloat16 else 0.0
            scale = want.abs().max() + (0 if i == 0 else math.prod(given[0].shape[:-1]) ** 0.5)
            tolerance = rounding * want.abs() * 1.001 + 4e-6 * (want.abs() + scale)
            assert ((got - want).abs() / tolerance).max() <= 1


@pytest.mark.parametrize("parts", PARTS)
def test_the_op_that_writes_a_part_has_fakes_and_checks(parts: str, tmp_path: Path) -> None:
    site = head_site(parts, backward=True, into=(16, 8), rows=(2, 3))
    module = imported(NORM_ROPE_TRITON, site, tmp_path / f"fake_part_{parts}")
    function = getattr(module, symbol(site)[0])
    check_outputs(function(*map(empty, site.inputs)), site)
    *given, whole = head_inputs(site, 2, 3, 1)
    with pytest.raises(ValueError, match=r"dy is .* on cpu; expected"):
        function(*given, whole)
    with pytest.raises(ValueError, match="dy is"):
        function(given[0][..., :1], *given[1:], whole)


# --- machine code ---


def compiled(site: Site, folder: Path, tile: HeadTile | None = None, stride: int | None = None) -> Any:
    module = imported(with_tile(tile), site, folder)
    element = {"bf16": "*bf16", "f16": "*fp16", "f32": "*fp32"}[site.inputs[0].dtype]
    pointers = dict.fromkeys(("cos_ptr", "sin_ptr", "partial_ptr"), "*fp32")

    def type_of(name: str) -> str:
        return "i32" if name in ("B", "T") else pointers.get(name, element) if "_ptr" in name else "constexpr"

    return machine_code(module, site, type_of, {"STRIDE": stride or module.H * module.C})


def accesses(ptx: str, kind: str) -> dict[str, int]:
    """How many loads (`ld`) or stores (`st`) there are of each width."""
    return dict(Counter(re.findall(rf"\b{kind}\.global\.(\S+)", ptx)))


HALVES = [way for way in WAYS if not PARTS[way[0]][2]]  # the other channel of a pair of neighbors is a swap of lanes


@pytest.mark.parametrize(
    ("target", "name", "parts", "backward"),
    [
        *(("sm90", name, parts, backward) for name in ("golf", "gpt2") for parts, backward in HALVES),
        *(("sm80", "golf", "norm_gain", backward) for backward in (False, True)),
    ],
)
def test_loads_and_stores_have_sixteen_bytes(
    target: str, name: str, parts: str, backward: bool, tmp_path: Path
) -> None:
    heads, channels, _ = SHAPES[name]
    site = head_site(parts, SHAPES[name], backward, target)
    for stride in (heads * channels, 2 * heads * channels)[: 2 if name == "golf" else 1]:  # and in a wider projection
        ptx = compiled(site, tmp_path / f"wide_{target}_{name}_{parts}_{backward}_{stride}", None, stride).asm["ptx"]
        loads, stores = accesses(ptx, "ld"), accesses(ptx, "st")
        gain, whole, reads_x = PARTS[parts][1], name == "gpt2", backward and parts != "bare"
        weight = 2 - (backward and not whole) if PARTS[parts][3] else 0  # also that of the other channel of each pair
        read = 2 + (1 + whole) * reads_x  # of whole heads also the other channel of each pair
        assert loads.pop("v4.b32") == read + 4 + weight  # two of each angle, which are f32
        assert set(loads) == ({"b16"} if gain else set())
        if weight and backward:  # what a program has of the gradients
            assert sum(stores.values()) > 1 + whole
        else:
            assert stores.pop("v4.b32") == 1 + whole
            assert stores == ({"b32": 1} if gain and backward else {})
        assert ".f64" not in ptx and "atom" not in ptx


@pytest.mark.parametrize(
    ("name", "target"), [("one_pair", "sm80"), ("odd_part", "sm90"), ("odd_whole", "sm90"), ("most", "sm120")]
)
def test_odd_sizes_compile(name: str, target: str, tmp_path: Path) -> None:
    for dtype in ("bf16", "f32"):
        for backward in (False, True):
            site = head_site("norm_gain", SHAPES[name], backward, target, dtype)
            code = compiled(site, tmp_path / f"odd_{target}_{name}_{dtype}_{backward}")
            assert code.metadata.shared <= site.target.shared_memory


@pytest.mark.parametrize(("name", "into"), [("golf", (512, 512)), ("gpt2", (0, 1536))])
@pytest.mark.parametrize("parts", ["norm_gain", "bare", "weight_add_gain"])
def test_a_part_is_written_with_sixteen_bytes(name: str, into: tuple[int, int], parts: str, tmp_path: Path) -> None:
    """As many stores of as many bytes as a tensor of its own takes."""
    counts = []
    for place in (None, into):
        site = head_site(parts, SHAPES[name], True, into=place)
        ptx = compiled(site, tmp_path / f"part_{name}_{parts}_{place is None}").asm["ptx"]
        counts.append(accesses(ptx, "st"))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["golf", "gpt2"])
def test_tiles_to_measure_compile(name: str, tmp_path: Path) -> None:
    site = head_site("norm_gain", SHAPES[name], backward=True)
    for i, kernel in enumerate(NORM_ROPE_TRITON.variants(site)):
        tile = kernel.tile  # type: ignore[attr-defined]
        code = compiled(site, tmp_path / f"tile_{name}_{i}", tile)
        assert code.metadata.shared <= site.target.shared_memory and code.metadata.num_warps == tile.warps
