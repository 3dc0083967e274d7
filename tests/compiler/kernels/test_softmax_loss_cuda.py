"""The softmax loss of long rows in CUDA C++: what it takes and writes, its values on the CPU, and what nvcc makes."""

import json
import random
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import cuda_on_cpu
import pytest
import torch
from fork_server import run_script
from kernel_sites import check_clean, check_guards, check_outputs, empty, imported, inside, written
from loss_sites import CAP, FUNCTIONS, TERMS, buffers, columns, expected, loss_inputs, loss_site, op_of
from torch import Tensor

from specc.compiler.kernels.kernel import Site, missing, symbol
from specc.compiler.kernels.softmax_loss.cuda import (
    SOFTMAX_LOSS_CUDA,
    SoftmaxLossCuda,
    StagedTile,
    shared_bytes,
    staged_tile,
)
from specc.compiler.kernels.softmax_loss.softmax_loss import SOFTMAX_LOSS_TRITON, WHOLE
from specc.compiler.plan.lock import Entry, locked_kernel, tile_data
from specc.compiler.targets import TARGETS
from specc.runtime.support.native import compile_only

BOTH = ("mean", "none")
GPT2 = (50257, 50304)


def with_tile(*numbers: object) -> SoftmaxLossCuda:
    return replace(SOFTMAX_LOSS_CUDA, tile=StagedTile(*numbers))  # type: ignore[arg-type]


def random_site(rng: random.Random) -> Site:
    vocab = rng.randint(WHOLE + 1, 49_000)
    width = -(-vocab // 8) * 8 + 8 * rng.randint(0, 9)
    reduction = rng.choice(BOTH)
    return loss_site(
        vocab,
        width,
        rng.choice(list(FUNCTIONS.values())),
        reduction,
        rng.choice(("sm80", "sm86", "sm90", "sm100")),
        rng.choice(("bf16", "bf16", "f32")),
        rng.choice((("T",), ("B", "T"))),
        rng.choice(list(TERMS)) if reduction == "mean" else "",
    )


def test_random_sites_render_as_clean_files(tmp_path: Path) -> None:
    rng, rendered = random.Random(5), 0
    while rendered < 25:
        site = random_site(rng)
        for kernel in (SOFTMAX_LOSS_CUDA, *SOFTMAX_LOSS_CUDA.variants(site)[:2]):
            if kernel.rejects(site) is not None:
                continue
            written(kernel, site, tmp_path / f"site_{rendered}")
            rendered += 1
    check_clean(tmp_path, 120)


def test_files_say_what_they_are_and_for_what_machine(tmp_path: Path) -> None:
    for target, arch, copy in (("sm90", "sm_90a", "TMA"), ("sm86", "sm_86", "cp.async")):
        source, launcher = written(SOFTMAX_LOSS_CUDA, loss_site(*GPT2, target=target), tmp_path / target)
        assert (source.name, launcher.name) == ("softmax_loss__v50257.cu", "softmax_loss__v50257.py")
        for text in (source.read_text(), launcher.read_text()):
            assert "logits bf16[T,50304], targets i64[T] -> loss f32[]" in text
            assert f"CUDA C++ for {target}: {copy} copies a row to shared memory, 7 steps of it" in text
        assert f"\n// arch: {arch}\n" in source.read_text()


def test_it_stands_before_the_triton_kernel_on_hopper_alone_for_long_rows_alone() -> None:
    for target, sign in (("sm90", -1), ("sm80", 1), ("sm89", 1)):
        site = loss_site(*GPT2, target=target)
        assert SOFTMAX_LOSS_CUDA.rejects(site) is None is missing(SOFTMAX_LOSS_CUDA, site.target)
        assert (SOFTMAX_LOSS_CUDA.rank(site) - SOFTMAX_LOSS_TRITON.rank(site)) * sign > 0
    assert missing(SOFTMAX_LOSS_CUDA, TARGETS["cpu"]) == "cpu has no cuda"


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (loss_site(1000), "is for rows of more than 8192 columns, which do not fit into registers; these have 1000"),
        (loss_site(9001), "copies 16 bytes at a time; a row of 9001 columns has 18002"),
        (
            loss_site(50257, 50304, dtype="f16"),
            "reads logits in bf16 or f32; in f16 the gradient of a mean underflows",
        ),
        (
            loss_site(128256),
            "keeps a row in shared memory; one of 128256 columns in bf16 takes 257024 bytes, sm90 has 232448 a block",
        ),
        (
            loss_site(50257, 50304, target="sm86", dtype="f32"),
            "keeps a row in shared memory; one of 50304 columns in f32 takes 201472 bytes, sm86 has 101376 a block",
        ),
    ],
)
def test_refusals_say_why(site: Site, reason: str) -> None:
    assert SOFTMAX_LOSS_CUDA.rejects(site) == reason


def test_tiles_that_a_site_has_no_room_for_are_refused() -> None:
    site = loss_site(*GPT2)
    assert "sm80 has no tma" in str(with_tile(512, 2, 1, "bulk").rejects(loss_site(*GPT2, target="sm80")))
    assert "at most 32 steps; 128 threads x 1, " in str(with_tile(128, 1, 2, "bulk").rejects(site))
    three = with_tile(256, 2, 3, "async").rejects(site)
    assert three is not None and three.endswith("bytes, sm90 has 76800 a block where 3 share a multiprocessor")
    nested = "silu(" * 12 + "z" + ")" * 12
    assert f"cannot print {nested}" in str(SOFTMAX_LOSS_CUDA.rejects(loss_site(*GPT2, f=nested)))


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((96, 2, 1, "async"), "threads is 96, but must be a power of two from 128 to 512"),
        ((1024, 2, 1, "async"), "threads is 1024"),
        ((256, 3, 1, "async"), "vectors is 3"),
        ((256, 16, 1, "async"), "vectors is 16"),
        ((256, 2, 0, "async"), "resident is 0"),
        ((512, 2, 3, "async"), "threads x resident is 1536"),
    ],
)
def test_tiles_have_bounds(numbers: tuple[object, ...], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        StagedTile(*numbers)  # type: ignore[arg-type]


def test_the_rule_puts_two_rows_on_a_multiprocessor_where_both_fit() -> None:
    assert staged_tile(loss_site(*GPT2)) == StagedTile(512, 2, 2, "bulk", False)
    assert staged_tile(loss_site(*GPT2, dtype="f32")) == StagedTile(512, 2, 1, "bulk")
    assert staged_tile(loss_site(*GPT2, target="sm80")) == StagedTile(512, 2, 1, "async")


@pytest.mark.parametrize("target", ["sm80", "sm86", "sm90", "sm100", "sm120"])
def test_every_variant_fits_and_comes_back_from_a_lock(target: str) -> None:
    for vocab, width in (GPT2, (8200, 8256), (100_000, 100_032)):
        site = loss_site(vocab, width, target=target)
        variants = SOFTMAX_LOSS_CUDA.variants(site)
        assert len(variants) == len(set(variants)) and bool(variants) == (SOFTMAX_LOSS_CUDA.rejects(site) is None)
        for kernel in variants:
            assert isinstance(kernel, SoftmaxLossCuda) and kernel.tile is not None
            room = (site.target.shared_memory + 1024) // kernel.tile.resident - 1024
            assert shared_bytes(site, kernel.tile) <= room
            assert kernel.tile.copy == "async" or "tma" in site.target.features
            data = json.loads(json.dumps(tile_data(kernel)))
            assert data == asdict(kernel.tile)
            entry = Entry(node="n", site="s", kernel=kernel.name, tile=data, rows=1, ms=1.0, floor_ms=1.0)
            assert locked_kernel(entry) == kernel


# --- on the CPU ---

SMALL = (
    ((8200, 8200), "plain", "bf16"),  # all logits
    ((8193, 8256), "capped", "bf16"),  # a part of a vector, and whole ones of padding
    ((8289, 8292), "odd", "f32"),
    ((10240, 12288), "plain", "bf16"),  # a step of padding alone
)
WAYS = ((128, 2, 1, "bulk"), (128, 1, 1, "async"), (128, 4, 2, "bulk", False), (256, 2, 2, "async", False))
CASES = [(*shape, "mean", WAYS[i], "") for i, shape in enumerate(SMALL)] + [(*SMALL[1], "none", WAYS[0], "")]
CASES += [(*SMALL[1], "mean", WAYS[i], terms) for i, terms in enumerate(("weighted", "later", "all"))]
CASES += [(*SMALL[2], "mean", WAYS[3], "all")]
ROWS = (1, 8)  # of a machine of three multiprocessors: blocks have several rows, and not all as many
Case = tuple[tuple[int, int], str, str, str, tuple[object, ...], str]


def given(site: Site, m: int) -> list[Tensor]:
    """Of several rows one has a target that is no token, one NaN, one -inf alone, and one much of it."""
    logits, targets, *others = loss_inputs(site, m, m)
    if m > 1:
        targets[2], targets[4] = -1, 2**40
        logits[3, 9:4000] = -torch.inf
        logits[5, 17] = torch.nan
        logits[6] = -torch.inf
        targets[3] = 5000
        for ahead in others[: len(op_of(site).further)]:
            ahead[3] = 5000
    return [logits, targets, *others]


def launched(source: Path, site: Site, runs: list[Any], behind: Any) -> tuple[list[Any], Any]:
    """The runs and what their tensors are views of, after the kernel ran on the CPU in a process of its own."""
    cases, out = source.with_suffix(".cases.pt"), source.with_suffix(".out.pt")
    torch.save((runs, behind), cases)
    words = (str(cuda_on_cpu.compiled(source)), symbol(site)[0], str(cases), str(out))
    run_script(Path(cuda_on_cpu.__file__), *words, folder=source.parent)
    result: tuple[list[Any], Any] = torch.load(out)
    return result


@pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("tile", WAYS[1:3], ids=str)
def test_the_gradient_may_be_written_over_the_logits(tile: tuple[object, ...], tmp_path: Path) -> None:
    """A row is in shared memory, and every thread has read its target, before its first gradient is stored."""
    (vocab, width), f, dtype = SMALL[1]
    site = loss_site(vocab, width, FUNCTIONS[f], "mean", dtype=dtype)
    source, _ = written(with_tile(*tile), site, tmp_path)
    runs = []
    for m in ROWS:
        logits, targets = given(site, m)
        nats, grad = torch.empty(m), torch.full_like(logits, torch.nan)
        over, again = logits.clone(), torch.empty(m)
        runs += [(m, [logits, targets, nats, grad]), (m, [over, targets, again, over])]
    runs, _ = launched(source, site, runs, None)
    for (_, (_, _, nats, grad)), (_, (over, _, again, _)) in zip(runs[::2], runs[1::2], strict=True):
        assert torch.equal(nats.view(torch.int32), again.view(torch.int32))
        assert torch.equal(grad.view(torch.int16), over.view(torch.int16))


@pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_kernel_on_the_cpu_gives_the_reference(case: Case, tmp_path: Path) -> None:
    (vocab, width), f, dtype, reduction, way, terms = case
    site = loss_site(vocab, width, FUNCTIONS[f], reduction, dtype=dtype, terms=terms)
    kernel = with_tile(*way)
    assert kernel.rejects(site) is None
    source, _ = written(kernel, site, tmp_path)
    runs, written_buffers = [], []
    for m in ROWS:
        written_buffers.append(buffers(site, m))
        outputs = [inside(buffer, n) for buffer, n in zip(written_buffers[-1], columns(site), strict=False)]
        runs.append((m, [*given(site, m), *outputs]))
    runs, written_buffers = launched(source, site, runs, written_buffers)
    for (m, (logits, targets, *others)), buffers_of_m in zip(runs, written_buffers, strict=True):
        assert torch.equal(logits.nan_to_num(7.0), given(site, m)[0].nan_to_num(7.0)), "an input was written"
        numbers = torch.ones(m, dtype=torch.bool)
        if m > 1:
            numbers[[2, 4, 5]] = False
            numbers[6] = f == "capped"  # of which -inf is a number
        sane = logits.where(numbers[:, None], 0.0)  # the reference takes no others
        wanted = expected(site, [sane, targets.clamp(0, vocab - 1), *others[: site.node.op.arity - 2]])
        for name, buffer, n, want in zip(("nats", "grad"), buffers_of_m, columns(site), wanted, strict=False):
            result = inside(buffer, n)
            padding = result[:, vocab:] if name == "grad" else result[:0]
            assert (padding == 0).all(), "the gradient of the padding is not 0"
            assert result[~numbers][:, :vocab].isnan().all(), f"{name} of a row that has none is a number"
            got, sure = result[numbers].double(), want.view(m, -1)[numbers]
            rounding = 2.0**-8 if buffer.dtype == torch.bfloat16 else 0.0
            tolerance = rounding * sure.abs() * 1.001 + 4e-6 * (sure.abs() + sure[sure.isfinite()].abs().max())
            excess = ((got - sure).abs() / tolerance).max()
            assert excess <= 1, f"{name} with {m} rows is off by {excess:.3g} tolerances"
            inside(buffer, n)[~numbers] = 0
            check_guards(buffer, name)


# --- nvcc ---


@pytest.mark.nvcc
@pytest.mark.parametrize("reduction", BOTH)
@pytest.mark.parametrize(
    ("f", "dtype", "target", "terms"),
    [(CAP, "bf16", "sm90", ""), (CAP, "f32", "sm90", ""), ("z", "bf16", "sm86", ""), (CAP, "bf16", "sm90", "all")],
)
def test_kernels_compile_without_spills(
    f: str, dtype: str, target: str, terms: str, reduction: str, tmp_path: Path
) -> None:
    site = loss_site(*GPT2, f, reduction, target, dtype, terms=terms)
    source, _ = written(SOFTMAX_LOSS_CUDA, site, tmp_path)
    compiled = compile_only(source)  # raises where ptxas spills
    assert b".nv_fatbin" in compiled.read_bytes() and compile_only(source) == compiled


@pytest.mark.nvcc
def test_tiles_to_measure_compile(tmp_path: Path) -> None:
    for i, kernel in enumerate(SOFTMAX_LOSS_CUDA.variants(loss_site(*GPT2, CAP))[::3]):
        source, _ = written(kernel, loss_site(*GPT2, CAP), tmp_path / str(i))
        assert compile_only(source).is_file()


@pytest.mark.nvcc
def test_the_launcher_declares_what_the_library_defines(tmp_path: Path) -> None:
    for reduction in BOTH:
        site = loss_site(*GPT2, reduction=reduction)
        module = imported(SOFTMAX_LOSS_CUDA, site, tmp_path / f"launcher_{reduction}")
        code, function = module.native(), symbol(site)[0]
        assert len(getattr(code, function).argtypes) == (6 if reduction == "mean" else 5)
        assert getattr(code, f"{function}_status")(0) == b"no error"


# --- the op ---


@pytest.mark.parametrize("reduction", BOTH)
def test_fakes_have_the_shapes_and_dtypes_of_the_node(reduction: str, tmp_path: Path) -> None:
    for rows in ((0,), (5,), (2, 3)):
        site = loss_site(9000, 9024, CAP, reduction, rows=rows)
        module = imported(SOFTMAX_LOSS_CUDA, site, tmp_path / f"fake_cuda_{reduction}_{len(rows)}{rows[0]}")
        check_outputs(getattr(module, symbol(site)[0])(*map(empty, site.inputs)), site)


def test_wrong_inputs_are_refused_with_names_and_numbers(tmp_path: Path) -> None:
    site = loss_site(9000, 9024)
    op = imported(SOFTMAX_LOSS_CUDA, site, tmp_path / "checked_cuda_loss").softmax_loss
    with pytest.raises(ValueError, match=r"logits is torch.bfloat16 \[6, 9024\].* on cpu; expected .* on one GPU"):
        op(*loss_inputs(site, 6, 1))
