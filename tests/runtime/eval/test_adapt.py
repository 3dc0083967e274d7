"""Models that adapt to what they are scored on: by the definition, one window at a time in float64; and whether what
comes later moves what came before."""

import hashlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapt_scene import ADAMW, CAUSAL, CHUNK, LORA, METHODS, SLOT, STRIDE, TTT, Nats, adapted, counted, opened_at, plain
from run_samples import make_run, model_of, small_spec
from torch import Tensor

from specc.runtime.errors import RunFailure
from specc.runtime.eval.evaluate import evaluate
from specc.runtime.eval.options import EvaluateError, EvaluateOptions
from specc.runtime.eval.text import Adapted
from specc.runtime.metrics.bits_per_byte import BitsPerByte
from specc.runtime.open_model import OpenedModel
from specc.runtime.storage.run_directory import Run

WINDOW = 32
LR = {"cosine": lambda done: 0.5 * (1 + np.cos(np.pi * done)), "constant": lambda done: 1.0}


@pytest.fixture(scope="module")
def opened(run: Run) -> OpenedModel:
    return opened_at(run.directory)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A text of documents, some shorter than a stride, and its tokens."""
    folder = tmp_path_factory.mktemp("text")
    chooser = random.Random(3)
    documents = [bytes(chooser.choices(b"abc de", k=length)) + b"\n" for length in (70, 3, 1, 90, 5, 33)]
    return written(folder, documents), [token for text in documents for token in (256, *text)]


def written(folder: Path, documents: list[bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.txt").write_bytes(b"not read")
    (folder / "val.txt").write_bytes(b"<|endoftext|>\n".join(documents))
    return folder


def windows(last: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """start, scored before, end: each scores the targets behind `scored before`, up to `end`."""
    scored, end = 0, min(WINDOW, last)
    while scored < last:
        yield max(0, end - WINDOW), scored, end
        scored, end = end, min(end + stride, last)


def naive_slot(run: Run, tokens: list[int], how: dict[str, Any], causal: bool) -> Nats:
    """SLOT with AdamW written out, on the unfused model in float64: one window a vector, or so many."""
    model: Any = model_of(run.spec.model_copy(update={"eval": _eval(run)}), fuse=False).model.double()
    nats = np.zeros(len(tokens) - 1)
    parts = list(windows(len(tokens) - 1, STRIDE))
    size = 1 if causal else how["windows"]
    for first in range(0, len(parts), size):
        part, rows = parts[first : first + size], []
        for start, scored, end in part:
            ids, targets = torch.tensor([tokens[start:end]]), torch.tensor([tokens[start + 1 : end + 1]])
            fitted = range(scored - start) if causal else range(end - start - 1)
            with torch.no_grad():
                rows.append((model.features(ids), targets, list(fitted)))
        delta = torch.zeros(1, 1, 32, dtype=torch.float64)
        m, v = torch.zeros_like(delta), torch.zeros_like(delta)
        count = sum(len(fitted) for _, _, fitted in rows)
        for step in range(1, 6 if count else 1):
            free = delta.clone().requires_grad_()
            loss = sum(model.nats(x + free, targets)[0, fitted].sum() for x, targets, fitted in rows) / count
            (grad,) = torch.autograd.grad(loss, free)
            m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
            delta = delta * (1 - how["lr"] * 1e-8)
            delta -= how["lr"] * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-5)
        for (_, scored, end), (x, targets, _) in zip(part, rows, strict=True):
            with torch.no_grad():
                nats[scored:end] = model.nats(x + delta, targets)[0, -(end - scored) :].numpy()
    return nats


def _eval(run: Run) -> Any:
    from specc.runtime.eval.text import adapting

    return adapting(run.spec, EvaluateOptions(adapt="slot", stride=STRIDE)).eval


@pytest.mark.parametrize("kind", ["slot", "slot_causal"])
def test_slot_is_its_definition(
    run: Run, opened: OpenedModel, tokens: tuple[Path, list[int]], kind: str, tmp_path: Path
) -> None:
    result = counted(lambda: adapted(opened, METHODS[kind], data=str(tokens[0]), cache=tmp_path))
    want = naive_slot(run, tokens[1], METHODS[kind], kind == "slot_causal")
    np.testing.assert_allclose(result, want, rtol=2e-4, atol=2e-4)
    without = counted(lambda: plain(opened, data=str(tokens[0]), cache=tmp_path))
    first = slice(0, WINDOW)
    assert np.allclose(result[first], without[first], atol=1e-5) == (kind == "slot_causal")  # nothing was scored before
    assert np.abs(result - without)[WINDOW:].min() > 0 and np.abs(result - without).max() > 1e-2


def naive_ttt(run: Run, tokens: list[int], how: dict[str, Any], learner: Callable[[Any, dict[str, Any]], Any]) -> Nats:
    """Score-first training, a row at a time; what `learner` makes of the model takes each step, which is a call with
    the gradients, by name, and the share of the chunks that is done."""
    model: Any = model_of(run.spec, fuse=False).model.double()
    nats, last = np.zeros(len(tokens) - 1), len(tokens) - 1
    parts = list(windows(last, STRIDE))
    ends = [i for i, (_, scored, end) in enumerate(parts) if scored // CHUNK != end // CHUNK and end < last]
    weights, step, trained, done = dict(model.named_parameters()), learner(model, how), 0, 0
    for i, (start, scored, end) in enumerate(parts):
        with torch.no_grad():
            ids, targets = torch.tensor([tokens[start:end]]), torch.tensor([tokens[start + 1 : end + 1]])
            nats[scored:end] = model.score(ids, targets)[0, -(end - scored) :].numpy()
        if i not in ends:
            continue
        rows, to = [], trained
        while to < end:
            before, to = to, min(to + WINDOW, end)
            rows.append((max(0, to - WINDOW), before, to))
        for _ in range(how["epochs"]):
            for first in range(0, len(rows), how["batch"]):
                some = rows[first : first + how["batch"]]
                count, loss = sum(b - a for _, a, b in some), torch.zeros((), dtype=torch.float64)
                for begin, a, b in some:
                    ids, targets = torch.tensor([tokens[begin:b]]), torch.tensor([tokens[begin + 1 : b + 1]])
                    loss = loss + model.score(ids, targets)[0, -(b - a) :].sum() / count
                grads = torch.autograd.grad(loss, list(weights.values()))
                with torch.no_grad():
                    step(dict(zip(weights, grads, strict=True)), done / len(ends))
        trained, done = end, done + 1
    assert done == len(ends) >= 3
    return nats


def naive_sgd(model: Any, how: dict[str, Any]) -> Callable[[dict[str, Tensor], float], None]:
    """All weights, by gradient descent with momentum 0.9, clipped to 1."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    momentum = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    def step(grads: dict[str, Tensor], done: float) -> None:
        norm = float(torch.stack([g.norm() for g in grads.values()]).norm())
        rate = how["optimizer"]["lr"] * LR["cosine"](done)
        for name, grad in grads.items():
            momentum[name] = 0.9 * momentum[name] + grad * min(1.0, 1 / (norm + 1e-6))
            weights[name] -= rate * momentum[name]

    return step


def naive_lora(model: Any, how: dict[str, Any]) -> Callable[[dict[str, Tensor], float], None]:
    """Each matrix W becomes W + scale / rank * B A; A and B learn by AdamW, at one rate."""
    rank, rate, decay = how["lora"]["rank"], how["optimizer"]["lr"], how["optimizer"]["weight_decay"]
    factor, count = how["lora"]["scale"] / rank, 0
    weights: dict[str, Tensor] = {name: w for name, w in model.named_parameters() if w.dim() == 2}
    base = {name: weight.detach().clone() for name, weight in weights.items()}
    halves: dict[str, tuple[Tensor, ...]] = {}
    for name, (rows, columns) in ((name, weight.shape) for name, weight in weights.items()):
        digest = hashlib.sha256(f"{small_spec().train.seed} {name} lora".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        a = (2 * torch.rand(rank, columns, generator=generator) - 1) * columns**-0.5
        halves[name] = (a.double(), torch.zeros(rows, rank, dtype=torch.float64))
    moments = {name: [[torch.zeros_like(x), torch.zeros_like(x)] for x in pair] for name, pair in halves.items()}

    def step(grads: dict[str, Tensor], done: float) -> None:
        nonlocal count
        count += 1
        for name, (a, b) in halves.items():
            for x, grad, mv in zip(
                (a, b), (factor * b.T @ grads[name], factor * grads[name] @ a.T), moments[name], strict=True
            ):
                mv[0], mv[1] = 0.9 * mv[0] + 0.1 * grad, 0.999 * mv[1] + 0.001 * grad**2
                x *= 1 - rate * decay
                x -= rate * (mv[0] / (1 - 0.9**count)) / ((mv[1] / (1 - 0.999**count)).sqrt() + 1e-8)
            weights[name].copy_(base[name] + factor * b @ a)

    return step


@pytest.mark.parametrize(("how", "learner"), [(TTT, naive_sgd), (LORA, naive_lora)], ids=["whole", "lora"])
def test_training_is_its_definition(
    run: Run, opened: OpenedModel, tokens: tuple[Path, list[int]], how: dict[str, Any], learner: Any, tmp_path: Path
) -> None:
    before = {name: weight.clone() for name, weight in opened.model.state_dict().items()}
    result = counted(lambda: adapted(opened, how, data=str(tokens[0]), cache=tmp_path))
    np.testing.assert_allclose(result, naive_ttt(run, tokens[1], how, learner), rtol=1e-3, atol=1e-3)
    without = counted(lambda: plain(opened, data=str(tokens[0]), cache=tmp_path))
    learned = CHUNK + WINDOW  # by then, the first chunk was trained on
    assert np.array_equal(result[:WINDOW], without[:WINDOW]) and np.abs(result - without)[learned:].min() > 1e-4
    assert result.sum() < without.sum()
    assert all(torch.equal(weight, before[name]) for name, weight in opened.model.state_dict().items())
    assert all(weight.requires_grad for weight in opened.model.parameters())


def test_what_learns_is_what_the_pattern_covers(
    opened: OpenedModel, tokens: tuple[Path, list[int]], tmp_path: Path
) -> None:
    """A rate of next to nothing moves nothing; every other way to learn gives another score, and each learns."""
    where = {"data": str(tokens[0]), "cache": tmp_path}
    without = plain(opened, **where).nats
    still = {**TTT, "optimizer": {"kind": "sgd", "lr": 1e-30}}
    assert adapted(opened, still, **where).counted.nats == without
    ways = [
        TTT,
        ADAMW,
        LORA,
        {**ADAMW, "match": "*.up"},
        {**LORA, "lora": {"rank": 1, "scale": 6.0}},
        {**TTT, "clip_norm": 0.1},
    ]
    results = [adapted(opened, how, **where).counted.nats for how in ways]
    assert len({*results, without}) == len(ways) + 1 and max(results) < without
    assert adapted(opened, LORA, **where).counted.nats == results[2]  # the same seed, the same score


@pytest.mark.parametrize("kind", ["plain", *METHODS])
def test_what_comes_later_moves_nothing_before_it_where_that_is_promised(
    opened: OpenedModel, tokens: tuple[Path, list[int]], kind: str, tmp_path: Path
) -> None:
    """All tokens from position p on are others. No bit of an earlier score may move; of published SLOT some do."""

    def nats(text: Path) -> Nats:
        where = {"data": str(text), "cache": tmp_path}
        return counted(lambda: plain(opened, **where) if kind == "plain" else adapted(opened, METHODS[kind], **where))

    documents, moved = (tokens[0] / "val.txt").read_bytes().split(b"<|endoftext|>\n"), []
    before, length = nats(tokens[0]), len(tokens[1])
    for first in (40, 75, 130, length - 4):
        other = written(tmp_path / str(first), _changed(documents, first))
        after = nats(other)
        assert after.shape == before.shape and not np.array_equal(after[first:], before[first:])
        moved.append(not np.array_equal(after[: first - 1], before[: first - 1]))
    assert any(moved) == (kind == "slot"), moved
    assert kind != "slot" or all(moved[1:])


def _changed(documents: list[bytes], first: int) -> list[bytes]:
    """The documents with every byte at a token position from `first` on replaced, but the line feed that ends each."""
    outputs, at = [], 0
    for text in documents:
        outputs.append(bytes(byte if at + 1 + i < first else byte ^ 1 for i, byte in enumerate(text[:-1])) + b"\n")
        at += 1 + len(text)
    return outputs


def test_a_number_that_is_not_causal_is_never_a_score(opened: OpenedModel, tmp_path: Path) -> None:
    for how in (SLOT, CAUSAL, TTT):
        result = adapted(opened, how, cache=tmp_path, max_tokens=200)
        causal = how is not SLOT
        assert isinstance(result, Adapted) and not isinstance(result, BitsPerByte)
        assert not any(hasattr(result, word) for word in ("nats", "bpb", "bpb_pieces", "record", "line", "summary"))
        facts: Any = result.facts()
        key, other = ("adapted", "non_causal") if causal else ("non_causal", "adapted")
        assert set(facts) == {"causal", key} and facts["causal"] is facts[key]["causal"] is causal
        assert facts[key]["method"] == how["kind"] and facts[key]["tokens"] == 200 and other not in facts
        head, *_, last = result.report()
        assert result.done in head and facts[key]["done"] == result.done
        assert last.startswith(
            f"causal: {how['kind']}" if causal else "NON-CAUSAL, not the model's score: slot is fitted"
        )
        assert all("non-causal" in line.lower() for line in (head, last)) != causal


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_what_hangs_on_the_length_of_the_text_says_so(
    opened: OpenedModel, tokens: tuple[Path, list[int]], tmp_path: Path, schedule: str
) -> None:
    """The cosine divides by all chunks, so a text that goes on scores otherwise from the second chunk on."""
    how, results = {**TTT, "schedule": schedule}, []

    def score(count: int) -> None:
        results.append(adapted(opened, how, data=str(tokens[0]), cache=tmp_path, max_tokens=count))

    scores = [counted(partial(score, count))[:150] for count in (200, 400)]
    assert np.array_equal(*scores) == (schedule == "constant")
    said = [("the total number of tokens" in result.report()[-1]) == (schedule == "cosine") for result in results]
    assert said == [True, True]


def test_a_correction_is_not_broken_by_the_rate_where_none_is_given(opened: OpenedModel, tmp_path: Path) -> None:
    result, plainly = (
        adapted(opened, {"kind": "ttt", "chunk": 50, "lora": lora}, cache=tmp_path, max_tokens=400).counted.nats
        for lora in ({"rank": 2}, {"rank": 2, "scale": 1e-9})
    )
    assert result < 1.05 * plainly


def test_a_spec_that_adapts_is_scored_as_it_is(run: Run, tmp_path: Path) -> None:
    """Its settings are those of `--adapt` alone, which they are only where the kind is the same."""
    given = "eval={batch: 4, stride: 8, adapt: {kind: slot, steps: 2}}"
    other = make_run(tmp_path / "run", small_spec(given), run.data)
    score = evaluate(other.directory, EvaluateOptions(cache=tmp_path, max_tokens=150))
    want = evaluate(run.directory, EvaluateOptions(cache=tmp_path, max_tokens=150, stride=8))
    assert isinstance(score, BitsPerByte) and score == want
    fitted = evaluate(other.directory, EvaluateOptions(cache=tmp_path, max_tokens=150, adapt="slot"))
    assert isinstance(fitted, Adapted) and fitted.facts()["non_causal"]["settings"]["steps"] == 2  # type: ignore[index]
    fitted = evaluate(other.directory, EvaluateOptions(cache=tmp_path, max_tokens=150, adapt="slot_causal"))
    assert isinstance(fitted, Adapted) and fitted.facts()["adapted"]["settings"]["steps"] == 5  # type: ignore[index]


def test_a_spec_with_a_rule_for_every_tensor_can_adapt() -> None:
    """As that of a quantized model is, whose bits were allocated: far longer than a line of YAML may be."""
    rules = ", ".join(f"{{match: never.{i}.there, scheme: round, bits: 8}}" for i in range(200))
    spec = small_spec(f"quant.rules=[{rules}]")
    from specc.runtime.eval.text import adapting

    adapter = adapting(spec, EvaluateOptions(adapt="slot", stride=STRIDE))
    assert adapter.quant == spec.quant and adapter.eval.adapt.kind == "slot"  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [1, 20, 33])
@pytest.mark.parametrize("kind", METHODS)
def test_a_text_as_short_as_a_window_is_scored(opened: OpenedModel, kind: str, count: int, tmp_path: Path) -> None:
    result = adapted(opened, METHODS[kind], cache=tmp_path, max_tokens=count).counted
    want = plain(opened, cache=tmp_path, max_tokens=count)
    assert (result.tokens, result.piece_bytes) == (count, want.piece_bytes)
    assert (result.nats == pytest.approx(want.nats, rel=1e-6)) == (kind != "slot" or count == 1) or count == 33


def test_what_cannot_adapt_is_refused(run: Run, opened: OpenedModel, tmp_path: Path) -> None:
    from specc.compiler.errors import SpecError
    from specc.runtime.eval.adapt.method import AdaptError

    with pytest.raises(SpecError, match="`slot_causal` needs windows that overlap"):
        adapted(opened, CAUSAL, cache=tmp_path, stride=32)
    assert adapted(opened, SLOT, cache=tmp_path, batch=4, max_tokens=50).counted.tokens == 50
    with pytest.raises(EvaluateError, match="the settings of slot require a batch of 4 windows") as caught:
        adapted(opened, SLOT, cache=tmp_path, batch=3)
    assert caught.value.exit_code == 2
    with pytest.raises(SpecError, match="has an unknown kind, `slo`"):
        evaluate(run.directory, EvaluateOptions(adapt="slo"))
    with pytest.raises(SpecError, match="`step` is not a valid key"):
        evaluate(run.directory, EvaluateOptions(adapt="{kind: slot, step: 3}"))
    with pytest.raises(AdaptError, match="matches no parameter"):
        adapted(opened, {**TTT, "match": "nothing.*"}, cache=tmp_path)
    with pytest.raises(AdaptError, match="matches no matrix"):
        adapted(opened, {**LORA, "match": "*.residual"}, cache=tmp_path)
    with pytest.raises(RunFailure, match="weights are not finite after chunk"):
        wild = {**TTT, "optimizer": {"kind": "sgd", "lr": 1e38}, "clip_norm": None}
        adapted(opened, wild, cache=tmp_path)
    assert all(bool(weight.isfinite().all()) for weight in opened.model.parameters())
    for window, stride in ((0, 8), (16, 17), (-1, None)):
        with pytest.raises(EvaluateError, match=r"is not in 1 \.\.|must be from 1 to"):
            plain(opened, window=window, stride=stride, cache=tmp_path)
