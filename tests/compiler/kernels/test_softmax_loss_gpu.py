"""The softmax loss on a GPU, at odd numbers of rows: against float64 and against Torch's own cross-entropy."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernel_sites import check_guards, imported, inside, rms
from loss_sites import CAP, TERMS, buffers, columns, eager, expected, loss_inputs, loss_site, op_of
from torch import Tensor

from specc.compiler.kernels.kernel import Site, symbol
from specc.compiler.kernels.softmax_loss.softmax_loss import SOFTMAX_LOSS_TRITON
from specc.runtime.model.load import runs_on

pytestmark = pytest.mark.gpu

# The golf model's and GPT-2's head; fewer columns than a vector has, odd ones, and the last that stays in registers.
SHAPES = {
    "golf": (1024, 1024),
    "gpt2": (50257, 50304),
    "bytes": (257, 320),
    "tiny": (5, 5),
    "odd": (1001, 1001),
    "whole": (8192, 8192),
    "chunks": (8193, 8256),
    "odd_chunks": (9001, 9001),
}
FUNCTIONS = {"plain": "z", "capped": CAP}
ROWS = (1, 3, 127, 1000)
Way = tuple[str, str, str, str]
ALL: list[Way] = [
    (shape, f, reduction, "bf16") for shape in SHAPES for f in FUNCTIONS for reduction in ("mean", "none")
] + [(shape, "capped", "mean", "f32") for shape in ("golf", "gpt2", "odd")]
ALL += [(shape, terms, "mean", "bf16") for shape in ("bytes", "gpt2", "chunks") for terms in ("weighted", "all")]


def load(way: Way, folder: Path) -> tuple[Site, ModuleType]:
    """The site of a kernel, and its generated module."""
    shape, f, reduction, dtype = way
    site = loss_site(*SHAPES[shape], FUNCTIONS.get(f, CAP), reduction, "sm80", dtype, terms=f if f in TERMS else "")
    major, minor = torch.cuda.get_device_capability()
    assert runs_on(site.target, major * 10 + minor)
    return site, imported(SOFTMAX_LOSS_TRITON, site, folder / "_".join(way))


def launched(module: ModuleType, site: Site, inputs: list[Tensor]) -> list[Tensor]:
    """Nats and gradient, taken from poisoned buffers whose guards are checked."""
    out = buffers(site, inputs[1].numel(), "cuda")
    results = [inside(buffer, width) for buffer, width in zip(out, columns(site), strict=True)]
    module.launch(*inputs, *results)
    for name, buffer in zip(("nats", "grad"), out, strict=False):
        check_guards(buffer, name)
    return [results[0].view(-1), *results[1:]]


LARGE = pytest.mark.gpu(gigabytes=12)  # references of 50,304 columns in float64


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=LARGE if way[::3] == ("gpt2", "f32") else ()) for way in ALL], ids="-".join
)
def test_outputs_are_at_least_as_exact_as_plain_torch(way: Way, folder: Path) -> None:
    site, module = load(way, folder)
    vocab = op_of(site).vocab
    for m in ROWS:
        for spread in (0.1, 3.0, 30.0):
            inputs = loss_inputs(site, m, m, "cuda", spread)
            before = [value.clone() for value in inputs]
            result = launched(module, site, inputs)
            assert all(map(torch.equal, before, inputs)), "an input was written"
            if len(result) > 1:
                assert (result[1][:, vocab:] == 0).all(), "the gradient of the padding is not 0"
            # Which of two chains in f32 is nearer is chance; and as a sigmoid, tanh is exact to roundings of its cap.
            grad = 0.0 if way[3] == "bf16" else 2e-5 * rms(expected(site, inputs)[-1])
            for got, exact, plain, few in zip(
                result, expected(site, inputs), eager(site, inputs), (1e-5, grad), strict=False
            ):
                error, bar = got.double() - exact, plain.double() - exact
                words = f"{m} rows of spread {spread}"
                assert rms(error) <= 1.005 * rms(bar) + few, f"{words}: RMS {rms(error)}, {rms(bar)}"
                assert error.abs().max() <= 2 * bar.abs().max() + 8 * few, words


@pytest.mark.parametrize("way", [way for way in ALL if way[0] in ("golf", "gpt2")], ids="-".join)
def test_ops_give_what_launches_give_eager_and_compiled(way: Way, folder: Path, poison: None) -> None:
    site, module = load(way, folder)
    op = getattr(module, symbol(site)[0])
    torch.compiler.reset()
    compiled = torch.compile(op, fullgraph=True, dynamic=True)
    for m in (3, 127, 1000):
        inputs = loss_inputs(site, m, m, "cuda")
        nats, *grad = launched(module, site, inputs)
        wanted = [nats.mean(), *grad] if grad else [nats]
        for run in (op, compiled):
            logits = inputs[0].clone()
            outputs = run(logits, *inputs[1:])
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            assert all(map(torch.equal, outputs, wanted))
            assert torch.equal(logits, wanted[1] if grad else inputs[0])  # the gradient overwrites the logits


@pytest.mark.parametrize("way", [way for way in ALL if way[0] in ("golf", "chunks")], ids="-".join)
def test_leading_dims_strides_of_targets_and_no_rows(way: Way, folder: Path, poison: None) -> None:
    site, module = load(way, folder)
    op = getattr(module, symbol(site)[0])
    logits, targets, *others = loss_inputs(site, 6 * 35, 2, "cuda")
    flat = op(logits.clone(), targets, *others)
    window = torch.zeros(6, 36, dtype=torch.int64, device="cuda")
    window[:, 1:] = targets.view(6, 35)
    rows = [value.view(6, 35) if value.dim() else value for value in others]
    shaped = op(logits.view(6, 35, -1), window[:, 1:], *rows)  # a window of a longer sequence, and not contiguous
    if isinstance(flat, tuple):
        assert torch.equal(shaped[0], flat[0]) and torch.equal(shaped[1].view_as(flat[1]), flat[1])
    else:
        assert torch.equal(shaped.view(-1), flat) and shaped.shape == (6, 35)
    none = op(logits[:0], targets[:0], *(value[:0] if value.dim() else value for value in others))
    loss = none[0] if isinstance(none, tuple) else none
    assert loss.isnan().all() if loss.dim() == 0 else loss.shape == (0,)


@pytest.mark.parametrize("way", [way for way in ALL if way[2] == "mean"], ids="-".join)
def test_a_target_that_is_no_token_reads_nothing_and_gives_nan(way: Way, folder: Path) -> None:
    site, module = load(way, folder)
    for bad in (-1, -100, op_of(site).vocab, 2**40, -(2**62)):
        inputs = loss_inputs(site, 5, 3, "cuda")
        good = launched(module, site, inputs)
        inputs[1][2] = bad
        nats, grad = (torch.full_like(value, 7.0) for value in good)
        module.launch(*inputs, nats, grad)
        vocab = op_of(site).vocab
        assert nats[2].isnan() and grad[2, :vocab].isnan().all() and (grad[2, vocab:] == 0).all()
        others = torch.tensor([0, 1, 3, 4], device="cuda")
        assert torch.equal(nats[others], good[0][others]) and torch.equal(grad[others], good[1][others])


@pytest.mark.parametrize("way", ALL, ids="-".join)
def test_a_hundred_runs_are_bit_equal(way: Way, folder: Path) -> None:
    site, module = load(way, folder)
    inputs = loss_inputs(site, 777, 3, "cuda")
    first = launched(module, site, inputs)
    outputs = [torch.empty_like(value) for value in first]
    for _ in range(100):
        for value in outputs:
            value.fill_(torch.nan)
        module.launch(*inputs, *outputs)
        assert all(map(torch.equal, outputs, first))


@pytest.mark.gpu(gigabytes=20)
def test_logits_of_more_than_two_billion_elements(folder: Path) -> None:
    """The micro-batch of GPT-2: rows lie beyond what 32 bits can count."""
    site, module = load(("gpt2", "plain", "mean", "bf16"), folder)
    m, width = 2**31 // 50304 + 333, 50304
    generator = torch.Generator("cuda").manual_seed(1)
    logits = torch.empty(m, width, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
    targets = torch.randint(50257, (m,), generator=generator, device="cuda")
    nats = torch.full((m,), torch.nan, device="cuda")
    grad = torch.full_like(logits, torch.nan)
    module.launch(logits, targets, nats, grad)
    for part in (slice(0, 100), slice(m // 2, m // 2 + 100), slice(m - 100, m)):
        wanted, slope = expected(site, [logits[part], targets[part]])
        assert ((nats[part].double() - wanted).abs() <= 1e-5).all()
        slope = slope * (100 / m)  # the mean is over all rows
        assert ((grad[part].double() - slope).abs() <= 2.0**-8 * slope.abs() + 1e-12).all()
    assert not nats.isnan().any() and not any(piece.isnan().any() for piece in grad.split(1 << 13))


def test_wrong_inputs_are_refused_before_the_launch(folder: Path) -> None:
    site, module = load(("golf", "plain", "mean", "bf16"), folder)
    op = module.softmax_loss
    logits, targets = loss_inputs(site, 64, 5, "cuda")
    wrong = {
        r"logits is torch.float16 .* expected contiguous, 16-byte aligned torch.bfloat16": (logits.half(), targets),
        r"logits is torch.bfloat16 \[64, 1023\]": (logits[:, :1023], targets),
        r"logits is .*strides \(1, 64\)": (logits.T.contiguous().T, targets),
        r"targets is torch.int32 \[64\].*expected .* torch.int64": (logits, targets.int()),
        r"targets is torch.int64 \[63\].*expected .* \[64\]": (logits, targets[:63]),
        r"targets is .* on cpu": (logits, targets.cpu()),
        r"logits is torch.bfloat16 \[64, 1024\], strides \(1024, 1\)": (
            torch.empty(64 * 1024 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(64, 1024),
            targets,
        ),
    }
    for message, inputs in wrong.items():
        with pytest.raises(ValueError, match=message):
            op(*inputs)
