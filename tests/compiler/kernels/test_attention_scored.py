"""Attention with a score and a mask: what the kernels take and write, in Triton's interpreter, and as machine code."""

from pathlib import Path
from typing import Any

import pytest
import torch
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
from scored_sites import CASES, Attention, exact, kernel_of, scored_inputs

from specc.compiler.expr.mask import Mask
from specc.compiler.expr.score import Score
from specc.compiler.kernels.attention.score_lines import ScoreLines
from specc.compiler.kernels.attention.score_tile import ScoreGradTile, ScoreTile
from specc.compiler.kernels.attention.scored import SCORED_GRAD
from specc.compiler.kernels.kernel import Site, symbol

SMALL = (4, 2, 16)
T5 = Attention("s + bias[h, bucket(i - j, 32, 128)]", tables={"bias": (8, 32)})


# --- what they take and write ---


def test_every_kind_renders_as_clean_python(tmp_path: Path) -> None:
    for i, attention in enumerate(CASES.values()):
        for backward in (False, True):
            site = attention.site(SMALL, backward)
            written(kernel_of(site), site, tmp_path / f"site_{i}_{backward}")
    check_clean(tmp_path, 200)  # names of expressions may be long


def test_plain_scores_and_masks_that_are_equal_have_one_text() -> None:
    texts = [
        Attention("s + 0 * i", "i >= j").site(SMALL).node.op,
        Attention("s", "j <= i").site(SMALL).node.op,
    ]
    assert texts[0] == texts[1]


def test_whole_tiles_compute_neither_mask_nor_element() -> None:
    lines = ScoreLines.of(
        Score.of("s + bias[h, bucket(i - j, 32, 128)]", ("bias",), 8), Mask.of("j <= i", 8), (("bias", (8, 32)),)
    )
    assert lines.scores(masked=False) == ("read0 = read0_far", "x = s + read0")
    seen, load, x = lines.scores(masked=True)
    assert (seen, x) == ("seen = j <= i", "x = s + read0") and "tl.load(read0_by_queries_ptr + " in load
    assert lines.scores(masked=True, by_keys=True)[1].count("tl.load(read0_by_keys_ptr + ") == 1


def test_a_bias_of_the_distance_is_one_operation_per_score() -> None:
    lines = ScoreLines.of(Score.of("s - slope(h) * (i - j)", (), 8), Mask.of("j <= i", 8), ())
    assert lines.value == "s - tl.exp2(-fh - 1.0) * fi + tl.exp2(-fh - 1.0) * fj"
    assert lines.convert("fi", "fj") == ("fi = (i - i0).to(tl.float32)", "fj = (j - i0).to(tl.float32)")


def test_functions_are_computed_once_for_score_and_gradient() -> None:
    lines = ScoreLines.of(Score.of("30 * tanh(s / 30)", (), 8), Mask.of("j <= i", 8), ())
    assert [name for name, _ in lines.calls] == ["tanh0"]
    assert (lines.value, lines.slope) == ("30.0 * tanh0", "1.0 - tanh0 * tanh0")


def test_refusals_say_why_with_numbers() -> None:
    def reason(shape: tuple[int, int, int], attention: Attention = CASES["window"], **words: Any) -> str | None:
        site = attention.site(shape, **words)
        return kernel_of(site).rejects(site)

    assert reason((8, 4, 64)) is None and reason((7, 1, 9), backward=True) is None and reason((8, 8, 256)) is None
    assert reason((8, 4, 64), dtype="f32") == "computes in bf16 or f16, not in f32"
    assert reason((4, 4, 257)) == "takes heads of at most 256 channels; these have 257"
    table = Attention("s + p[i % 64, j % 64]", tables={"p": (64, 64)})
    assert reason((4, 4, 64), table) is None
    limit = "adds up gradients of tables of at most 2,048 elements if the index is not a function of i - j"
    assert reason((4, 4, 64), table, backward=True) == f"{limit}; p has 4,096"
    site = T5.site((8, 4, 64), backward=True)
    refused = kernel_of(site, (64, 32, 4, 2), (64, 64, 4, 2)).rejects(site)
    assert refused == "takes square tiles for dq where a table is read at i - j, and not 64x32"


def test_tiles_to_measure_are_distinct_fit_and_begin_with_the_rule() -> None:
    for attention in (CASES["window"], T5):
        for backward in (False, True):
            for channels, target in ((64, "sm90"), (128, "sm86"), (256, "sm120")):
                site = attention.site((8, 4, channels), backward, target=target)
                kernel = kernel_of(site)
                tiles = [variant.tile for variant in kernel.variants(site)]  # type: ignore[attr-defined]
                assert len(set(tiles)) == len(tiles) >= 1
                assert all(variant.rejects(site) is None for variant in kernel.variants(site))
                assert kernel.render(site).tile == str(tiles[0])
    assert str(ScoreTile(64, 32, 4, 2)) == "64x32, 4 warps, 2 stages"
    both = ScoreGradTile(ScoreTile(64, 64, 4, 2), ScoreTile(32, 64, 1, 1))
    assert str(both) == "dq 64x64, 4 warps, 2 stages; dk, dv 32x64, 1 warp, 1 stage"
    with pytest.raises(ValueError, match="queries is 48, but must be a power of two from 16 to 256"):
        ScoreTile(48, 32, 4, 2)


def test_measured_tiles_replace_the_rule(tmp_path: Path) -> None:
    site = CASES["window"].site(SMALL, True)
    kernel = kernel_of(site, (32, 64, 8, 3), (16, 128, 2, 1))
    (path,) = written(kernel, site, tmp_path / "measured")
    assert "\nDQ_QUERIES, DQ_KEYS, DQ_WARPS, DQ_STAGES = 32, 64, 8, 3\n" in path.read_text()
    assert "\nDK_QUERIES, DK_KEYS, DK_WARPS, DK_STAGES = 16, 128, 2, 1\n" in path.read_text()


@pytest.mark.parametrize("name", ["documents", "one table twice"])
@pytest.mark.parametrize("backward", [False, True])
def test_ops_state_their_types_without_a_gpu(name: str, backward: bool, tmp_path: Path) -> None:
    site = CASES[name].site(SMALL, backward)
    module = imported(kernel_of(site), site, tmp_path / f"fake_scored_{name.replace(' ', '_')}_{backward}")
    op = getattr(module, symbol(site)[0])
    sizes = {"B": 3, "T": 5}
    check_outputs(op(*(empty(type, **sizes) for type in site.inputs)), site, **sizes)
    with pytest.raises(ValueError, match=r"is torch.bfloat16 .* on cpu; wants torch.bfloat16 .* on one GPU"):
        op(*(empty(type, "cpu", **sizes) for type in site.inputs))


# --- Triton's interpreter ---

SQUARE = ((32, 32, 4, 2), (32, 16, 4, 2), (32, 32, 4, 2), (16, 32, 4, 2))  # forward; dq, where it may be any; dq; dk
# Sequences, tokens, elements between tokens of q, k and v: beyond a window, several sequences, and the rest.
LONG, SEVERAL, SHORT = ((1, 80, 8), (3, 1, 0)), ((2, 61, 0), (3, 1, 0)), ((1, 61, 8), (2, 1, 0))
LENGTHS = {"window": LONG, "buckets first": LONG, "documents": SEVERAL, "one table twice": SEVERAL}


def tiles_of(site: Site, backward: bool) -> tuple[tuple[int, int, int, int], ...]:
    forward, oblong, square, keys = SQUARE
    if not backward:
        return (forward,)
    kernel = kernel_of(site, oblong, keys)
    return (oblong if kernel.rejects(site) is None else square, keys)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool, int], Any]:
    """The contents that the interpreter leaves in the buffers of each case and its lengths."""
    folder = tmp_path_factory.mktemp("interpreted_scored")
    runs, keys = [], []
    for i, (name, attention) in enumerate(CASES.items()):
        for backward in (False, True):
            site = attention.site(SMALL, backward, "f16")  # the interpreter's dot is wrong in bf16
            kernel = kernel_of(site, *tiles_of(site, backward))
            module = imported(kernel, site, folder / f"interpreted_scored_{i}_{backward}").__name__
            for k, (b, t, apart) in enumerate(LENGTHS.get(name, SHORT)):
                given = scored_inputs(site, b, t, k, apart=apart)
                wanted = exact(site, given)
                pairs = zip(wanted, site.node.types, strict=True)
                buffers = [
                    torch.full((w.numel() + 2 * GUARD,), torch.nan, dtype=DTYPES[type.dtype]) for w, type in pairs
                ]
                runs.append((str(folder), module, given, buffers, [want.shape[-1] for want in wanted]))
                keys.append((name, backward, k))
    return dict(zip(keys, interpret(folder, runs), strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_give_the_reference(
    name: str, backward: bool, interpreted: dict[tuple[str, bool, int], Any]
) -> None:
    site = CASES[name].site(SMALL, backward, "f16")
    for k, (b, t, apart) in enumerate(LENGTHS.get(name, SHORT)):
        buffers, unchanged = interpreted[name, backward, k]
        assert unchanged, "an input was written"
        wanted = exact(site, scored_inputs(site, b, t, k, apart=apart))
        for label, buffer, want in zip(site.node.op.output_labels, buffers, wanted, strict=True):
            check_guards(buffer, label)
            got = buffer[GUARD : buffer.numel() - GUARD].view(want.shape).double()
            if label == "lse":
                tolerance = 4e-6 * (1 + want.abs())
            else:  # half a unit of f16 where a result is stored, and of each weight before it is multiplied
                tolerance = 2.0**-11 * (want.abs() + 4 * want.abs().max()) + 2.0**-10
            excess = ((got - want).abs() / tolerance).max()
            assert excess <= 1, f"{label} of {b} x {t} tokens is off by {excess:.3g} tolerances"


# --- machine code ---


def compiled(site: Site, kernel: str, folder: Path, *tiles: tuple[int, int, int, int]) -> Any:
    """The machine code of one of the kernels of a site."""
    module = imported(kernel_of(site, *tiles), site, folder)
    prefix = {"forward": "", "keys": "DK_"}.get(kernel, "DQ_")
    element = {"bf16": "*bf16", "f16": "*fp16"}[site.inputs[0].dtype]

    def type_of(name: str) -> str:
        if name.endswith("_ptr"):
            kinds = {"lse": "*fp32", "delta": "*fp32", "counts": "*i32", "order": "*i32", "start": "*i64"}
            sums = name.endswith(("_sums_ptr", "_diagonals_ptr"))
            return "*fp32" if sums else kinds.get(name.removesuffix("_ptr"), element)
        return "i32" if name in ("B", "T", "N", "STRIP") or name.endswith("STRIDE") else "constexpr"

    names = ("QUERIES", "KEYS", "WARPS", "STAGES")
    values = {name: getattr(module, prefix + name) for name in names}
    return machine_code(module, site, type_of, values, getattr(module, f"{kernel}_kernel"))


@pytest.mark.parametrize("target", ["sm80", "sm90", "sm120"])
def test_scores_stay_in_registers_and_are_multiplied_on_tensor_cores(target: str, tmp_path: Path) -> None:
    for kernel in ("forward", "queries", "keys"):
        site = CASES["documents"].site((8, 4, 64), kernel != "forward", target=target)
        code = compiled(site, kernel, tmp_path / f"scored_{target}_{kernel}")
        ptx = code.asm["ptx"]
        assert ("wgmma" if target == "sm90" else "mma.sync") in ptx
        assert ".f64" not in ptx and "atom" not in ptx and ".local" not in ptx
        assert "cp.async" in ptx and code.metadata.shared <= site.target.shared_memory


def test_kernels_that_sum_gradients_of_tables_compile(tmp_path: Path) -> None:
    site = T5.site((8, 4, 64), True)
    for kernel in ("queries", "keys", "read0_diagonals"):
        code = compiled(site, kernel, tmp_path / f"scored_tables_{kernel}")
        assert "atom" not in code.asm["ptx"] and code.metadata.shared <= site.target.shared_memory


@pytest.mark.parametrize(("shape", "target"), [((2, 2, 256), "sm86"), ((3, 1, 24), "sm90"), ((4, 4, 128), "sm120")])
def test_other_sizes_compile(shape: tuple[int, int, int], target: str, tmp_path: Path) -> None:
    for kernel in ("forward", "queries", "keys"):
        site = CASES["window"].site(shape, kernel != "forward", "f16", target)
        code = compiled(site, kernel, tmp_path / f"scored_size_{target}_{kernel}")
        assert code.metadata.shared <= site.target.shared_memory


def test_variants_are_of_the_kernel_of_the_gradient() -> None:
    site = T5.site((8, 4, 64), True)
    tiles = [kernel.tile for kernel in SCORED_GRAD.variants(site)]  # type: ignore[attr-defined]
    assert all(tile.queries.queries == tile.queries.keys for tile in tiles)
