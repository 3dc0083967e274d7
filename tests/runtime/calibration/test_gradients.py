"""The cost of an error in a lookup table, against its effect on the loss, and of rows that calibration does
not read."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from run_samples import make_run, model_of, small_spec, write_text
from torch import Tensor, nn
from torch.nn import functional as F

from specc.compiler.quant.gptq import Gptq
from specc.compiler.quant.round import Round
from specc.compiler.quant.scheme import Scheme, Seen
from specc.compiler.spec.spec import Calibrate
from specc.runtime.calibration.calibrate import calibration_windows, capture_gradients, capture_hessians
from specc.runtime.calibration.gradients import Gradients, Lookups
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.windows.stream import TokenStream, open_stream
from specc.runtime.errors import QuantizeError
from specc.runtime.quantize.bit_allocation import added_nats
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


def trained(stream: TokenStream, *changes: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A model that has nearly learnt the odds, in float64, and the windows that it is looked at with."""
    model = model_of(small_spec(*TABLES, *changes), fuse=False).model
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
def test_a_table_costs_what_it_does_to_the_loss(stream: TokenStream, tied: bool) -> None:
    """Against the definition, quantized in several ways. GPTQ makes the error of a tied table small for the head, and
    what it is to the lookups is then the larger part."""
    model, batches = trained(stream, f"model.head.tied={str(tied).lower()}")
    hessians, gradients = capture_hessians(model, iter(batches), CPU), capture_gradients(model, iter(batches), CPU)
    for name in ("embed.token", "embed.bigram.table", "attention_values.table"):
        weight, result = model.get_parameter(name).detach(), gradients[name]
        assert result.lookups is not None and result.lookups.shape == weight.shape
        multiplied = tied and name == "embed.token"
        assert (result.products is not None) == multiplied == (name in hessians)
        schemes: list[Scheme] = [Round(bits=4), *([Gptq(bits=4), Gptq(bits=5)] if multiplied else [])]
        for scheme in schemes:
            arrays = scheme.quantize_seen(weight, Seen(hessians.get(name)))
            error = weight - scheme.dequantize(arrays, tuple(weight.shape)).double()
            estimate, real = added_nats(error, hessians.get(name), result), cost_of(model, name, error, batches)
            assert estimate == pytest.approx(real, rel=0.4), (name, scheme.label())
            if multiplied and isinstance(scheme, Gptq):
                assert added_nats(error, hessians[name], Gradients(result.products)) < 0.6 * real


def test_the_gradients_are_those_of_each_row(stream: TokenStream) -> None:
    """Against the definition, by zeros added to what is looked up; of rows that were read several times, which the
    estimate of unread ones changes by a factor common to all."""
    model = model_of(small_spec(*TABLES), fuse=False).model.double()
    batches = list(calibration_windows(stream, Calibrate(sequences=12, batch=5), 32, seed=1))
    result = capture_gradients(model, iter(batches), CPU)
    names, embedding = {id(param): name for name, param in model.named_parameters()}, F.embedding
    seen: list[tuple[str, Tensor, Tensor]] = []

    def watch(ids: Tensor, table: Tensor) -> Tensor:
        added = torch.zeros(*ids.shape, table.shape[1], dtype=torch.float64, requires_grad=True)
        seen.append((names[id(table)], ids, added))
        return embedding(ids, table) + added

    sums = {
        name: torch.zeros_like(model.get_parameter(name)) for name, rows in result.items() if rows.lookups is not None
    }
    reads = {name: torch.zeros(len(total)) for name, total in sums.items()}
    assert sorted(sums) == ["attention_values.table", "embed.bigram.table", "embed.token"]
    for ids, targets in batches:
        seen.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "embedding", watch)
            nats = model.score(ids, targets)  # type: ignore[operator]
        for (name, places, _), gradient in zip(
            seen, torch.autograd.grad(nats.sum(), [added for *_, added in seen]), strict=True
        ):
            for place, row in zip(places.flatten().tolist(), gradient.flatten(0, -2), strict=True):
                sums[name].data[place] += row.square()
                reads[name][place] += 1
    for name, total in sums.items():
        lookups, read = result[name].lookups, reads[name] > 0
        assert lookups is not None and bool((lookups[~read] > 0).all())
        torch.testing.assert_close(lookups.sum(0) * 384, total.detach().sum(0), rtol=1e-9, atol=0)
        ratio = lookups[read] * 384 / total.detach()[read]
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-9, atol=0)
        assert float(ratio.min()) > 0.8 and float(ratio.max()) < 1 + 1e-9


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
        ids = torch.multinomial(odds, 6000, replacement=True, generator=generator).reshape(3, 2000)
        lookups = Lookups()
        for row in ids:
            lookups.add("t", vocab, row, torch.randn(2000, 3, generator=generator) * size[row, None])
        (result,) = lookups.a_token(6000).values()
        unread = torch.bincount(ids.flatten(), minlength=vocab) == 0
        estimate, real = estimate + float(result[unread].sum()), real + 3 * float((odds * size**2)[unread].sum())
        assert bool((result > 0).all())
        assert float(result[unread].max()) <= float(result.max())
        assert float(result.sum()) == pytest.approx(whole, rel=0.1)
    assert estimate == pytest.approx(real, rel=0.1) if used == vocab else estimate < 0.001 * 20 * whole


def test_a_table_all_of_which_was_read_is_told_as_it_was() -> None:
    lookups, gradient = Lookups(), torch.tensor([[[1.0, 2.0], [3.0, 0.0]], [[0.0, 0.0], [1.0, 1.0]]])
    lookups.add("t", 2, torch.tensor([[0, 1], [0, 0]], dtype=torch.int32), gradient)
    torch.testing.assert_close(lookups.a_token(4)["t"] * 4, torch.tensor([[2.0, 5.0], [9.0, 0.0]], dtype=torch.float64))
    lookups.add("t", 2, torch.tensor([1]), torch.tensor([[math.nan, 0.0]]))
    with pytest.raises(QuantizeError, match="t: the gradient of its rows holds NaN"):
        lookups.a_token(5)


def test_tables_that_are_only_looked_up_take_part(tmp_path: Path) -> None:
    """Under `match: "*"` of an untied model: each has a cost in the report, and bits are chosen for it."""
    changes = ("model.head.tied=false", "quant.allocate={bits: [3, 5, 8]}", "quant.budget_bytes=26000")
    run = make_run(tmp_path / "run", small_spec(*TABLES, *changes), str(write_text(tmp_path / "data")))
    quantize(run.directory, QuantizeOptions(cache=tmp_path / "cache", max_tokens=200), lambda _: None)
    rows = {row["name"]: row for row in json.loads((run.quantized / "report.json").read_text())["parameters"]}
    for name in ("embed.token", "embed.bigram.table", "attention_values.table"):
        assert rows[name]["bits"] in (3, 5, 8) and rows[name]["added_nats"] > 0
