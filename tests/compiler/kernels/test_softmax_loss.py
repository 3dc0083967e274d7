"""The softmax loss: what its kernels take and write, in Torch, in Triton's interpreter, and as machine code."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_sites import (
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
from loss_sites import CAP, FUNCTIONS, TERMS, buffers, columns, expected, loss_inputs, loss_site

from specc.compiler import kernels
from specc.compiler.catalog import catalog
from specc.compiler.kernels.kernel import Kernel, Site, missing, symbol
from specc.compiler.kernels.softmax_loss.softmax_loss import (
    SOFTMAX_LOSS_TORCH,
    SOFTMAX_LOSS_TRITON,
    WHOLE,
    RowTile,
    row_tile,
)
from specc.compiler.ops.loss import SoftmaxLoss
from specc.compiler.targets import TARGETS

BOTH = ("mean", "none")
# Vocabulary and columns: smaller than a vector, odd, padded, exactly a tile; a row in registers and one in chunks.
SHAPES = ((2, 2), (5, 64), (7, 7), (257, 320), (1000, 1000), (1024, 1024), (8191, 8191), (8200, 8200), (12301, 12352))


def random_site(rng: random.Random) -> Site:
    vocab = rng.choice((rng.randint(2, 9), rng.randint(2, 1500), rng.randint(2, 60_000)))
    reduction = rng.choice(BOTH)
    return loss_site(
        vocab,
        vocab + rng.choice((0, 0, rng.randint(1, 63))),
        rng.choice(list(FUNCTIONS.values())),
        reduction,
        rng.choice(("cpu", "sm80", "sm90", "sm120")),
        rng.choice(("bf16", "f32")),
        rng.choice((("T",), ("B", "T"))),
        rng.choice(list(TERMS)) if reduction == "mean" else "",
    )


def kernel_of(site: Site) -> Kernel:
    return SOFTMAX_LOSS_TRITON if "gpu" in site.target.features else SOFTMAX_LOSS_TORCH


def test_random_sites_render_as_clean_python(tmp_path: Path) -> None:
    rng = random.Random(3)
    for i in range(60):
        site = random_site(rng)
        written(kernel_of(site), site, tmp_path / f"site_{i}")
    check_clean(tmp_path)


def test_names_tell_what_is_computed_and_of_how_many_tokens() -> None:
    assert symbol(loss_site(50257, 50304)) == ("softmax_loss", "softmax_loss__v50257")
    assert symbol(loss_site(1024, f=CAP)) == ("softmax_loss_tanh", "softmax_loss_tanh__v1024")
    assert symbol(loss_site(1024, f=CAP, reduction="none")) == ("softmax_nats_tanh", "softmax_nats_tanh__v1024")


def test_every_target_has_one_kernel_for_it() -> None:
    results = [kernel for kernel in catalog(kernels, Kernel).values() if kernel.computes is SoftmaxLoss]
    for target in TARGETS:
        for reduction in BOTH:
            site = loss_site(1000, target=target, reduction=reduction, dtype=TARGETS[target].dtype)
            assert [k for k in results if not missing(k, site.target) and not k.rejects(site)] == [kernel_of(site)]


def test_refusals_say_why() -> None:
    reason = "on sm90, Torch would read the logits three times and keep them in f32"
    assert SOFTMAX_LOSS_TORCH.rejects(loss_site(1000)) == reason
    reason = "reads logits in bf16 or f32; in f16 the gradient of a mean underflows"
    assert SOFTMAX_LOSS_TRITON.rejects(loss_site(1000, dtype="f16")) == reason
    nested = "silu(" * 12 + "z" + ")" * 12
    reason = f"cannot print {nested}: the text of the expression has more than 20000 characters"
    assert SOFTMAX_LOSS_TRITON.rejects(loss_site(1000, f=nested)) == reason


@pytest.mark.parametrize(
    ("width", "tile"),
    [
        (2, RowTile(2048, 2, 4)),
        (64, RowTile(64, 64, 4)),
        (1024, RowTile(4, 1024, 4)),
        (1025, RowTile(2, 2048, 4)),
        (WHOLE, RowTile(1, 8192, 8)),
        (WHOLE + 1, RowTile(1, 4096, 16)),
        (50304, RowTile(1, 4096, 16)),
    ],
)
def test_tiles_follow_the_width(width: int, tile: RowTile) -> None:
    assert row_tile(width) == tile


def test_tiles_to_measure_can_hold_their_rows() -> None:
    for vocab in (8, 1024, 5000, 50304):
        tiles = [kernel.tile for kernel in SOFTMAX_LOSS_TRITON.variants(loss_site(vocab))]  # type: ignore[attr-defined]
        assert row_tile(vocab) in tiles and len(set(tiles)) == len(tiles) > 2
        assert all(tile.columns >= vocab or (tile.rows == 1 and vocab > WHOLE) for tile in tiles)


def test_a_measured_tile_replaces_the_rule(tmp_path: Path) -> None:
    for tile, line in (
        (RowTile(2, 1024, 8), "ROWS, BLOCK, WARPS = 2, 1024, 8"),
        (RowTile(1, 512, 2), "BLOCK, WARPS = 512, 2"),
    ):
        kernel = replace(SOFTMAX_LOSS_TRITON, tile=tile)
        (path,) = written(kernel, loss_site(1000), tmp_path / str(tile.rows))
        assert f"\n{line}\n" in path.read_text()


@pytest.mark.parametrize("reduction", BOTH)
@pytest.mark.parametrize("f", [*FUNCTIONS, *TERMS])
@pytest.mark.parametrize(("vocab", "width"), [(2, 2), (5, 64), (257, 320), (96, 96)])
def test_plain_torch_gives_the_reference(vocab: int, width: int, f: str, reduction: str, tmp_path: Path) -> None:
    terms = f if f in TERMS and reduction == "mean" else ""  # scoring has one term
    site = loss_site(vocab, width, FUNCTIONS.get(f, CAP), reduction, "cpu", "f32", terms=terms)
    module = imported(SOFTMAX_LOSS_TORCH, site, tmp_path / f"plain_{vocab}_{f}_{reduction}")
    function = getattr(module, symbol(site)[0])
    logits, targets, *others = (
        value.double() if value.is_floating_point() else value for value in loss_inputs(site, 6, 1)
    )
    before = logits.clone()
    for shape in ((6,), (2, 3)):
        shaped = [value.view(shape) if value.dim() else value for value in others]
        result = function(logits.view(*shape, width), targets.view(shape), *shaped)
        wanted = expected(site, [logits, targets, *others])
        results = result if isinstance(result, tuple) else (result,)
        shapes = [wanted[0].mean(), wanted[1].view(*shape, width)] if reduction == "mean" else [wanted[0].view(shape)]
        for have, want in zip(results, shapes, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-14)
    assert torch.equal(logits, before)
    with pytest.raises((IndexError, RuntimeError), match=r"out of bounds|index"):
        function(logits, targets + vocab, *others)


def test_plain_torch_keeps_the_dtype_of_the_logits(tmp_path: Path) -> None:
    site = loss_site(50, 64, CAP, "mean", "cpu", "bf16")
    function = imported(SOFTMAX_LOSS_TORCH, site, tmp_path / "plain_bf16").softmax_loss_tanh
    logits, targets = loss_inputs(site, 9, 2)
    loss, grad = function(logits, targets)
    nats, wanted = expected(site, [logits, targets])
    assert (loss.dtype, grad.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(loss.double(), nats.mean(), rtol=1e-6, atol=1e-6)
    assert ((grad.double() - wanted).abs() <= 2.0**-8 * wanted.abs() + 1e-9).all()


@pytest.mark.parametrize("reduction", BOTH)
@pytest.mark.parametrize("vocab", [100, 9000])
def test_fakes_have_the_shapes_and_dtypes_of_the_node(vocab: int, reduction: str, tmp_path: Path) -> None:
    for rows in ((0,), (5,), (2, 3)):
        site = loss_site(vocab, vocab + 8, CAP, reduction, rows=rows)
        module = imported(SOFTMAX_LOSS_TRITON, site, tmp_path / f"fake_{vocab}_{reduction}_{len(rows)}{rows[0]}")
        check_outputs(getattr(module, symbol(site)[0])(*map(empty, site.inputs)), site)


def test_wrong_inputs_are_refused_with_names_and_numbers(tmp_path: Path) -> None:
    site = loss_site(100, 104)
    op = imported(SOFTMAX_LOSS_TRITON, site, tmp_path / "checked_loss").softmax_loss
    logits, targets = loss_inputs(site, 6, 1)
    with pytest.raises(ValueError) as caught:
        op(logits, targets)  # every check passes but the device
    assert str(caught.value) == (
        "head.loss + softcap: logits is torch.bfloat16 [6, 104], strides (104, 1), on cpu; "
        "expected contiguous, 16-byte aligned torch.bfloat16 [6, 104] on one GPU"
    )
    with pytest.raises(ValueError, match=r"logits is torch.float32 \[6, 100\].*expected .* torch.bfloat16 \[6, 104\]"):
        op(logits.float()[:, :100], targets)


# --- Triton's interpreter ---

CASES = [
    (*shape, f, reduction, dtype)
    for shape in ((257, 320), (12301, 12352))
    for f, dtype in (("plain", "f32"), ("capped", "f32"), ("capped", "bf16"))
    for reduction in BOTH
]
CASES += [(*shape, "capped", "mean", "f32") for shape in SHAPES if shape not in ((257, 320), (12301, 12352))]
CASES += [(40, 40, f, "mean", "f32") for f in ("scaled", "odd")]
CASES += [
    (*shape, terms, "mean", dtype)
    for shape in ((257, 320), (12301, 12352))
    for terms, dtype in (("weighted", "f32"), ("weighted", "bf16"), ("later", "f32"), ("all", "f32"), ("all", "bf16"))
]
ROWS = (1, 3, 9)
Case = tuple[int, int, str, str, str]


def site_of(case: Case) -> Site:
    vocab, width, f, reduction, dtype = case
    return loss_site(vocab, width, FUNCTIONS.get(f, CAP), reduction, dtype=dtype, terms=f if f in TERMS else "")


def interpreter_inputs(site: Site, m: int) -> list[torch.Tensor]:
    """With a target that is no token in the last row but one, where there are several."""
    logits, targets, *weights = loss_inputs(site, m, m)
    if m > 2:
        targets[-2] = -100 if m == 3 else site.node.op.vocab  # type: ignore[attr-defined]
    return [logits, targets, *weights]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Case, int], Any]:
    """The contents that the interpreter leaves in the buffers of each case and number of rows."""
    folder = tmp_path_factory.mktemp("interpreted_loss")
    runs, keys = [], []
    for i, case in enumerate(CASES):
        site = site_of(case)
        module = imported(SOFTMAX_LOSS_TRITON, site, folder / f"interpreted_loss_{i}").__name__
        for m in ROWS:
            runs.append((str(folder), module, interpreter_inputs(site, m), buffers(site, m), columns(site)))
            keys.append((case, m))
    return dict(zip(keys, interpret(folder, runs), strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_interpreted_kernels_give_the_reference(case: Case, interpreted: dict[tuple[Case, int], Any]) -> None:
    site = site_of(case)
    for m in ROWS:
        outputs, unchanged = interpreted[case, m]
        assert unchanged, "an input was written"
        logits, targets, *weights = interpreter_inputs(site, m)
        known = (targets >= 0) & (targets < case[0])
        wanted = expected(site, [logits, targets.where(known, 0), *weights])
        for name, buffer, width, want in zip(("nats", "grad"), outputs, columns(site), wanted, strict=False):
            result = inside(buffer, width)
            padding = result[:, case[0] :] if name == "grad" else result[:0]
            assert (padding == 0).all(), "the gradient of the padding is not 0"
            assert result[~known][:, : case[0]].isnan().all(), "a target that is no token gives a number"
            got, want = result[known].double(), want.view(m, -1)[known]
            rounding = 2.0**-7 if buffer.dtype == torch.bfloat16 else 0.0  # the interpreter rounds it towards 0
            tolerance = rounding * want.abs() * 1.001 + 4e-6 * (want.abs() + want.abs().max())
            excess = ((got - want).abs() / tolerance).max()
            assert excess <= 1, f"{name} with {m} rows is off by {excess:.3g} tolerances"
        for name, buffer, width in zip(("nats", "grad"), outputs, columns(site), strict=False):
            inside(buffer, width)[~known] = 0  # NaN as it should be, and not for want of writing
            check_guards(buffer, name)


# --- machine code ---


def compiled(site: Site, folder: Path, tile: RowTile | None = None) -> Any:
    module = imported(replace(SOFTMAX_LOSS_TRITON, tile=tile), site, folder)
    element = {"bf16": "*bf16", "f32": "*fp32"}[site.inputs[0].dtype]
    pointers = {"logits_ptr": element, "targets_ptr": "*i64", "nats_ptr": "*fp32", "grad_ptr": element}
    pointers |= {f"{name}_ptr": "*fp32" for name in site.node.op.weights}  # type: ignore[attr-defined]
    return machine_code(module, site, lambda name: pointers.get(name, "i32" if name == "M" else "constexpr"))


@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize("f", ["z", CAP])
@pytest.mark.parametrize(("vocab", "width"), [(50257, 50304), (1024, 1024), (257, 320)])
def test_kernels_compile_to_loads_of_sixteen_bytes(vocab: int, width: int, f: str, target: str, tmp_path: Path) -> None:
    long = width > WHOLE
    for reduction in BOTH:
        site = loss_site(vocab, width, f, reduction, target)
        ptx = compiled(site, tmp_path / f"compiled_{target}_{vocab}_{reduction}_{len(f)}").asm["ptx"]
        wide = sum("ld.global" in line and ".v4.b32" in line for line in ptx.splitlines())
        narrow = sum("ld.global" in line and ".b16" in line for line in ptx.splitlines())
        assert (wide > 0, narrow) == (True, int(long))  # one logit alone: the target's
        written = sum("st.global" in line and ".v4.b32" in line for line in ptx.splitlines())
        assert (written > 0) == (reduction == "mean")
        assert ".f64" not in ptx and "atom" not in ptx


@pytest.mark.parametrize(
    ("vocab", "width", "target"), [(2, 2, "sm80"), (5, 5, "sm90"), (8191, 8191, "sm120"), (9001, 9001, "sm90")]
)
def test_odd_vocabularies_compile(vocab: int, width: int, target: str, tmp_path: Path) -> None:
    for reduction in BOTH:
        for dtype in ("bf16", "f32"):
            site = loss_site(vocab, width, CAP, reduction, target, dtype)
            code = compiled(site, tmp_path / f"odd_{target}_{vocab}_{reduction}_{dtype}")
            assert code.metadata.shared <= site.target.shared_memory


@pytest.mark.parametrize("vocab", [1024, 50304])
def test_tiles_to_measure_compile(vocab: int, tmp_path: Path) -> None:
    site = loss_site(vocab, f=CAP)
    for i, kernel in enumerate(SOFTMAX_LOSS_TRITON.variants(site)):
        tile = kernel.tile  # type: ignore[attr-defined]
        code = compiled(site, tmp_path / f"tile_{vocab}_{i}", tile)
        assert code.metadata.shared <= site.target.shared_memory and code.metadata.num_warps == tile.warps
