"""The uses of a parameter and the estimated rise of the loss by an error, against their definitions and against the
loss, and the rows that calibration does not read."""

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from run_samples import EXPERTS, make_run, model_of, small_spec, write_text
from torch import Tensor, nn
from torch.nn import functional as F

from specc.compiler.passes.assign_quant import reused
from specc.compiler.pipeline import lower
from specc.compiler.quant.gptq import Gptq
from specc.compiler.quant.round import Round
from specc.compiler.quant.scheme import Scheme, Seen
from specc.compiler.spec.spec import Calibrate
from specc.runtime.calibration import uses
from specc.runtime.calibration.added_nats import PASSES, added_nats
from specc.runtime.calibration.calibrate import calibration_windows, capture_hessians
from specc.runtime.calibration.uses import capture_uses, with_unread
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.windows.stream import TokenStream, open_stream
from specc.runtime.errors import QuantizeError
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize

CPU = torch.device("cpu")
TABLES = (
    "model.blocks.count=1",
    "model.embed=[{kind: token}, {kind: bigram, buckets: 64, dim: 8}, {kind: norm}]",
    "model.blocks.common={attention_values.table: {of: ids, shape: 8, init: {normal: 0.01}}, "
    "attention_values.project: {of: attention_values.table, shape: values}, "
    "attention_values.scale: {shape: 1, init: 0.1}}",
    "model.blocks.layers.0.learn={residual: {init: 1}, value_scale: {shape: 1, init: 1}}",
    "model.blocks.layers.0.v=v + value_scale * (attention_values.scale * attention_values.project)",
    "quant.promote=null",
    "quant.default={scheme: round, bits: 6}",
    'quant.rules=[{match: "*.{residual,q_gain,value_scale,scale}", scheme: none, dtype: f16}]',
)
LETTERS = "abcdefghijklmnopqrstuvwxyz .,;:ABCDEFGHI"


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenStream]:
    """Letters that follow each other by odds: a model comes to the odds, and then its gradients are those of its own
    text, whose squares are the curvature. Of sentences that it knows by heart they are not."""
    folder, draw = tmp_path_factory.mktemp("letters"), random.Random(7)
    odds = {letter: [math.exp(draw.gauss(0, 1.5)) for _ in LETTERS] for letter in LETTERS}
    text = ["a"]
    while len(text) < 60_000:
        text += draw.choices(LETTERS, odds[text[-1]])
    (folder / "train.txt").write_text("".join(text))
    (folder / "val.txt").write_text("".join(text[:1000]))
    opened = open_stream(folder, "train", ByteTokenizer(), folder / "cache")
    yield opened
    opened.close()


Trained = Callable[[bool], tuple[nn.Module, list[tuple[Tensor, Tensor]]]]


@pytest.fixture(scope="module")
def trained(stream: TokenStream) -> Trained:
    """A function that returns a model, tied or not, that has nearly learnt the odds, in float64, and the windows that
    it is looked at with."""
    models = cache(lambda tied: trained_model(stream, tied))
    return lambda tied: copy.deepcopy(models(tied))


def trained_model(stream: TokenStream, tied: bool) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    model = model_of(small_spec(*TABLES, f"model.head.tied={str(tied).lower()}"), fuse=False).model
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):
            noise = 0.3 * torch.randn(param.shape, generator=torch.Generator().manual_seed(i))
            param.copy_(noise * (param.shape[1] ** -0.5 if param.dim() == 2 else 0.0) + (param.dim() != 2))
    optimizer, steps = torch.optim.Adam(model.parameters(), 0.01), 300
    slower = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    text, generator = torch.from_numpy(stream.read(0, stream.tokens).astype("int64")), torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - 33, (32,), generator=generator).tolist()
        rows = torch.stack([text[start : start + 33] for start in starts])
        optimizer.zero_grad()
        model.score(rows[:, :-1], rows[:, 1:]).mean().backward()  # type: ignore[operator]
        optimizer.step()
        slower.step()
    return model.double(), list(calibration_windows(stream, Calibrate(sequences=128, batch=64), 32, seed=1))


def cost_of(model: nn.Module, name: str, error: Tensor, batches: list[tuple[Tensor, Tensor]]) -> float:
    """The loss with `error` added to a parameter less the loss without; the mean of both signs, which leaves the second
    order."""
    param = model.get_parameter(name)

    def loss() -> float:
        with torch.no_grad():
            return float(torch.cat([model.score(*batch).flatten() for batch in batches]).mean())  # type: ignore[operator]

    result, values = -loss(), param.detach().clone()
    for sign in (1, -1):
        param.data.copy_(values + sign * error)
        result += loss() / 2
    param.data.copy_(values)
    return result


@pytest.mark.parametrize("tied", [True, False])
def test_a_table_costs_what_it_does_to_the_loss(trained: Trained, tied: bool) -> None:
    """Against the loss, quantized in several ways. GPTQ makes the error of a tied table small for the head, and
    what it is to the lookups is then the larger part."""
    model, batches = trained(tied)
    hessians = capture_hessians(model, iter(batches), CPU)
    names = ("embed.token", "embed.bigram.table", "attention_values.table")
    assert reused(lower(small_spec(*TABLES, f"model.head.tied={str(tied).lower()}"), "cpu")) == set(names)
    errors: dict[str, list[Tensor]] = {}
    for name in names:
        weight = model.get_parameter(name).detach()
        schemes: list[Scheme] = [Round(bits=4), *([Gptq(bits=4), Gptq(bits=5)] if name in hessians else [])]
        stored = [(scheme, scheme.quantize_seen(weight, Seen(hessians.get(name)))) for scheme in schemes]
        errors[name] = [weight - scheme.dequantize(s, tuple(weight.shape)).double() for scheme, s in stored]
    assert len(errors["embed.token"]) == (3 if tied else 1)
    estimates = added_nats(model, lambda: iter(batches), errors, CPU)
    for name, each in errors.items():
        for error, estimate in zip(each, estimates[name], strict=True):
            assert estimate == pytest.approx(cost_of(model, name, error, batches), rel=0.25, abs=1e-7), name


@pytest.mark.parametrize("changes", [(), ("model.blocks.order=0 0 0",), EXPERTS], ids=["tied", "a loop", "experts"])
def test_the_estimate_is_the_mean_square_of_the_derivative(stream: TokenStream, changes: tuple[str, ...]) -> None:
    """Against the definition, 1/2 E[(d . g)^2] with the gradient g of one token after the other: with all uses of tied
    tables, of weights that run several times, and of experts."""
    model = model_of(small_spec("model.blocks.count=1", *changes), fuse=False).model.double()
    windows = list(calibration_windows(stream, Calibrate(sequences=4, batch=4), 32, seed=1))
    generator = torch.Generator().manual_seed(0)
    errors = {
        name: [torch.randn(p.shape, generator=generator).double() for _ in range(2)]
        for name, p in model.named_parameters()
    }
    seen: list[int] = []
    estimates = added_nats(model, lambda: iter(windows), errors, CPU, lambda done, total: seen.append(done))
    assert seen[-1] == PASSES and seen == sorted(seen)
    exact = {name: [0.0, 0.0] for name in errors}
    ((ids, targets),) = windows
    for ids_of_row, targets_of_row in zip(ids, targets, strict=True):
        nats = model.score(ids_of_row[None], targets_of_row[None])  # type: ignore[operator]
        for token in nats.flatten():
            gradients = torch.autograd.grad(token, list(model.parameters()), retain_graph=True, allow_unused=True)
            for (name, both), gradient in zip(errors.items(), gradients, strict=True):
                for i, error in enumerate(both):
                    moved = 0.0 if gradient is None else float((error * gradient).sum())
                    exact[name][i] += 0.5 * moved**2 / ids.numel()
    assert sum(value > 0 for both in exact.values() for value in both) > 10
    for name, both in exact.items():
        for estimate, wanted in zip(estimates[name], both, strict=True):
            assert estimate == pytest.approx(wanted, rel=0.25, abs=1e-12), name


@pytest.mark.gpu
def test_a_gpu_measures_the_same(stream: TokenStream) -> None:
    """Uses, estimates, and the codes of a tied table, of the same float64 model on the CPU and on a GPU."""
    model = model_of(small_spec("model.blocks.count=1"), fuse=False).model.double()
    windows = list(calibration_windows(stream, Calibrate(sequences=8, batch=4), 32, seed=1))
    weight, results = model.get_parameter("embed.token").detach().clone(), []
    for device in (CPU, torch.device("cuda")):
        on_device = weight.to(device)
        seen = capture_uses(model.to(device), {"embed.token"}, iter(windows), device)["embed.token"]
        codes = Gptq(bits=5).quantize_seen(on_device, Seen(uses=seen))["codes"]
        estimate = added_nats(model, lambda: iter(windows), {"embed.token": [0.01 * on_device]}, device)
        results.append((seen, codes, estimate["embed.token"]))
    for use, other in zip(results[0][0], results[1][0], strict=True):
        for value, again in ((use.rows, other.rows.cpu()), (use.columns, other.columns.cpu())):
            torch.testing.assert_close(value, again, rtol=1e-5, atol=1e-6 * float(value.abs().max()))  # terms cancel
    assert float((results[0][1] != results[1][1]).mean()) < 1e-3
    assert results[0][2] == pytest.approx(results[1][2], rel=1e-3)


@pytest.mark.usefixtures("few_passes")
def test_a_gradient_that_is_not_finite_is_an_error(stream: TokenStream) -> None:
    model = model_of(small_spec("model.blocks.count=1"), fuse=False).model
    windows = list(calibration_windows(stream, Calibrate(sequences=4, batch=4), 32, seed=1))
    with torch.no_grad():
        model.get_parameter("blocks.0.mlp.up")[0, 0] = math.nan
    with pytest.raises(QuantizeError, match=r"embed\.token: the gradient of the loss contains NaN"):
        added_nats(model, lambda: iter(windows), {"embed.token": [torch.ones(257, 32)]}, CPU)
    with pytest.raises(QuantizeError, match=r"embed\.token: .* contains NaN or infinity"):
        capture_uses(model, {"embed.token"}, iter(windows), CPU)


@pytest.mark.parametrize("runs", [1, 3])
def test_uses_are_the_partial_traces_of_all_terms(
    stream: TokenStream, monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    """Against the definition: l r^T of every product and lookup, seen from inside the functions. Of rows that were
    read, which the estimate of unread ones changes by a factor common to all."""
    loop = [f"model.blocks.order=0{' 0' * (runs - 1)}"] * (runs > 1)
    model = model_of(small_spec(*TABLES, *loop), fuse=False).model.double()
    batches = list(calibration_windows(stream, Calibrate(sequences=12, batch=5), 32, seed=1))
    wanted = {"embed.token", "embed.bigram.table", "blocks.0.mlp.up"}
    several = reused(lower(small_spec(*TABLES, *loop), "cpu"))
    assert several >= {"embed.token", "embed.bigram.table"} and ("blocks.0.mlp.up" in several) == (runs > 1)
    monkeypatch.setattr(uses, "signed_sum", lambda nats, generator: nats.sum())
    result = capture_uses(model, wanted, iter(batches), CPU)
    assert {name: len(kinds) for name, kinds in result.items()} == {
        "embed.token": 2,
        "embed.bigram.table": 1,
        "blocks.0.mlp.up": 1,
    }
    names = {id(param): name for name, param in model.named_parameters()}
    linear, embedding = F.linear, F.embedding
    terms: list[tuple[str, int, Tensor, Tensor]] = []  # the name, the kind of use, l or ids, and the output

    def multiply(value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        terms.append((names[id(weight)], 0, value.detach().flatten(0, -2), linear(value, weight, bias)))
        return terms[-1][-1]

    def look_up(ids: Tensor, table: Tensor) -> Tensor:
        terms.append((names[id(table)], 1, ids.flatten(), embedding(ids, table)))
        return terms[-1][-1]

    outer: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
    reads = {name: torch.zeros(len(model.get_parameter(name))) for name in wanted}
    for ids, targets in batches:
        terms.clear()
        with monkeypatch.context() as patch:
            patch.setattr(F, "linear", multiply)
            patch.setattr(F, "embedding", look_up)
            nats = model.score(ids, targets)  # type: ignore[operator]
        gradients = torch.autograd.grad(nats.sum(), [out for *_, out in terms])
        for (name, kind, value, _), gradient in zip(terms, gradients, strict=True):
            if name in wanted:
                g, rows = gradient.flatten(0, -2), len(model.get_parameter(name))
                left, right = (g, value) if kind == 0 else (F.one_hot(value.long(), rows).double(), g)
                reads[name] += left.sum(0) if kind else 0
                both = (
                    torch.einsum("tn,tk->tnk", left, right).square().sum((0, 2)),
                    torch.einsum("tn,tk,tl->kl", left.square(), right, right),
                )
                before = outer.get((name, kind), (0.0, 0.0))
                outer[name, kind] = (before[0] + both[0], before[1] + both[1])
    tokens = 12 * 32
    for (name, kind), (rows_sum, columns) in outer.items():
        use = result[name][min(kind, len(result[name]) - 1)]
        torch.testing.assert_close(use.columns, columns / tokens, rtol=1e-9, atol=1e-15)
        read = reads[name] > 0 if kind else torch.ones(len(rows_sum), dtype=torch.bool)
        ratio = (use.rows / (rows_sum / rows_sum.sum()))[read & (rows_sum > 0)]
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-9, atol=0)
        assert float(use.rows.sum()) == pytest.approx(1)
        assert bool((use.rows[~read] > 0).all())


@pytest.mark.parametrize("bits", [4, 5])
def test_all_uses_of_a_tied_table_lose_less_than_its_head(trained: Trained, bits: int) -> None:
    """The rise of the loss of the same table, quantized in the metric of the head and in that of all uses."""
    model, batches = trained(True)
    weight = model.get_parameter("embed.token").detach()
    hessian = capture_hessians(model, iter(batches), CPU)["embed.token"]
    seen = capture_uses(model, {"embed.token"}, iter(batches), CPU)["embed.token"]
    rises = []
    for each in (Seen(hessian), Seen(uses=seen)):
        scheme = Gptq(bits=bits)
        error = weight - scheme.dequantize(scheme.quantize_seen(weight, each), tuple(weight.shape)).double()
        rises.append(cost_of(model, "embed.token", error, batches))
    assert 0 < rises[1] < 0.95 * rises[0]


def test_an_untied_table_is_solved_by_its_lookups(tmp_path: Path) -> None:
    """GPTQ of a table without a product, through the whole of quantize."""
    table = (
        'quant.rules=[{match: embed.token, scheme: gptq, bits: 4}, {match: "*.{residual,q_gain,value_scale,scale}", '
    )
    changes = ("model.head.tied=false", table + "scheme: none, dtype: f16}]")
    run = make_run(tmp_path / "run", small_spec(*TABLES, *changes), str(write_text(tmp_path / "data")))
    stages: list[str] = []
    options = QuantizeOptions(cache=tmp_path / "cache", max_tokens=200)
    result = quantize(run.directory, options, lambda _: None, lambda stage, done, total: stages.append(stage))
    (row,) = (row for row in result.rows if row.name == "embed.token")
    assert row.bits == 4 and row.solution is not None and "uses" in stages and "gradients" not in stages


@pytest.mark.parametrize(("vocab", "used"), [(4096, 4096), (4096, 120)])
def test_rows_that_were_not_read_cost_what_text_will_make_of_them(vocab: int, used: int) -> None:
    """Tables whose rows text reads by Zipf's law, all of them or few, rare rows with larger gradients: what is said of
    the unread rows together against what they will cost by expectation."""
    generator = torch.Generator().manual_seed(3)
    odds = torch.zeros(vocab, dtype=torch.float64)
    odds[torch.randperm(vocab, generator=generator)[:used]] = 1 / torch.arange(1, used + 1).double()
    odds /= odds.sum()
    size = 0.1 * (odds + 1e-5) ** -0.25
    estimate, real, whole = 0.0, 0.0, 3 * float((odds * size**2).sum())
    for _ in range(20):
        ids = torch.multinomial(odds, 6000, replacement=True, generator=generator)
        squares = (torch.randn(6000, 3, generator=generator) * size[ids, None]).double().square().sum(1)
        reads = ids.bincount(minlength=vocab)
        result = with_unread(torch.zeros(vocab).double().index_add_(0, ids, squares), reads) / 6000
        unread = reads == 0
        estimate, real = estimate + float(result[unread].sum()), real + 3 * float((odds * size**2)[unread].sum())
        assert bool((result > 0).all())
        assert float(result[unread].max()) <= float(result.max())
        assert float(result.sum()) == pytest.approx(whole, rel=0.1)
    assert estimate == pytest.approx(real, rel=0.1) if used == vocab else estimate < 0.001 * 20 * whole


def test_a_table_all_of_which_was_read_is_told_as_it_was() -> None:
    total = torch.tensor([7.0, 11.0], dtype=torch.float64)
    assert torch.equal(with_unread(total, torch.tensor([3, 1])), total)


@pytest.mark.usefixtures("few_passes")
def test_tables_that_are_only_looked_up_take_part(tmp_path: Path) -> None:
    """Under `match: "*"` of an untied model: each has a cost in the report, and bits are chosen for it."""
    changes = ("model.head.tied=false", "quant.allocate={bits: [3, 5, 8]}", "quant.budget_bytes=26000")
    run = make_run(tmp_path / "run", small_spec(*TABLES, *changes), str(write_text(tmp_path / "data")))
    quantize(run.directory, QuantizeOptions(cache=tmp_path / "cache", max_tokens=200), lambda _: None)
    rows = {row["name"]: row for row in json.loads((run.quantized / "report.json").read_text())["parameters"]}
    for name in ("embed.token", "embed.bigram.table", "attention_values.table"):
        assert rows[name]["bits"] in (3, 5, 8) and rows[name]["added_nats"] > 0
