"""Calibration: what the traced model shows is what every linear is really given."""

import sys

import numpy as np
import numpy.typing as npt
import pytest
import torch
from run_samples import EXPERTS, VARIANTS, model_of, small_spec
from torch import Tensor, nn
from torch.nn import functional as F

from specc.compiler import pipeline
from specc.compiler.passes.assign_quant import observed
from specc.compiler.spec.spec import Calibrate, Spec
from specc.runtime.calibration.calibrate import Capture, calibration_windows, capture_hessians
from specc.runtime.data.errors import DataError
from specc.runtime.data.windows.stream import TokenStream
from specc.runtime.errors import QuantizeError

CPU = torch.device("cpu")
LOOP = ("model.blocks.order=0..1 0..1 0..1",)
KINDS = {**VARIANTS, "a loop": LOOP}


def unfused(spec: Spec) -> nn.Module:
    return model_of(spec, fuse=False).model.double()


def watched_sums(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Tensor]:
    """X^T X a token of every linear, seen from inside `F.linear` while the model runs untraced."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    inputs: dict[str, list[Tensor]] = {}
    linear = F.linear

    def watch(value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        inputs.setdefault(names[id(weight)], []).append(value.detach().flatten(0, -2))
        return linear(value, weight, bias)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(F, "linear", watch)
        for ids, targets in batches:
            model.score(ids, targets)  # type: ignore[operator]
    rows = {name: torch.cat(parts) for name, parts in inputs.items()}
    tokens = sum(ids.numel() for ids, _ in batches)
    return {name: row.T @ row / tokens for name, row in rows.items()}


@pytest.mark.parametrize("variant", KINDS)
def test_every_hessian_is_that_of_what_the_linear_gets(
    variant: str, stream: TokenStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec(*KINDS[variant])
    assert spec.quant is not None
    model = unfused(spec)
    batches = list(calibration_windows(stream, spec.quant.calibrate, 32, seed=1))
    seen: list[int] = []
    hessians = capture_hessians(model, iter(batches), CPU, seen.append)
    expected = watched_sums(model, batches, monkeypatch)
    assert hessians.keys() == expected.keys()
    for name, hessian in hessians.items():
        assert hessian.dtype == torch.float64
        error = (hessian - expected[name]).abs().max() / expected[name].abs().max()
        assert float(error) < 1e-10, name
    assert seen == [4, 6]


def test_every_expert_has_the_hessian_of_its_rows(stream: TokenStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that are found by the choice of experts, and of the activations of each row alone."""
    spec = small_spec(*EXPERTS)
    assert spec.quant is not None
    model = unfused(spec)
    batches = list(calibration_windows(stream, spec.quant.calibrate, 32, seed=1))
    rows: dict[str, list[list[Tensor]]] = {}
    module = sys.modules[type(model).__module__]
    dispatch, names = vars(module)["top_experts"], {id(parameter): n for n, parameter in model.named_parameters()}
    chosen: list[Tensor] = []

    def watch(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        inputs = rows.setdefault(names[id(weight)], [[] for _ in weight])
        owner = chosen[-1].flatten().sort(stable=True).values
        for expert, entry in enumerate(inputs):
            entry.append(x.detach().flatten(0, -2)[owner == expert])
        return grouped(x, weight, ends)

    grouped = vars(module)["grouped_linear"]
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(module, "grouped_linear", watch)
        patch.setattr(module, "top_experts", lambda scores, count: chosen.append(dispatch(scores, count)) or chosen[-1])
        for ids, targets in batches:
            model.score(ids, targets)  # type: ignore[operator]
    tokens = sum(ids.numel() for ids, _ in batches)
    hessians = capture_hessians(model, iter(batches), CPU)
    experts = {name for name, parameter in model.named_parameters() if parameter.dim() == 3}
    assert rows.keys() == experts and len(experts) == 6
    assert observed(pipeline.lower(spec, "cpu"))[0] == hessians.keys() > experts
    for name, parts in rows.items():
        for hessian, expert in zip(hessians[name], parts, strict=True):
            seen = torch.cat(expert)
            torch.testing.assert_close(hessian, seen.T @ seen / tokens, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_matrix_of_every_block_is_captured(variant: str) -> None:
    model = unfused(small_spec(*VARIANTS[variant]))
    named = Capture(model, lambda name, value, ends: None).names
    matrices = {n for n, p in model.named_parameters() if p.dim() == 2 and p.shape[1] > 1}
    assert set(named) == matrices  # the tied embedding among them, by the head
    assert observed(pipeline.lower(small_spec(*VARIANTS[variant]), "cpu"))[0] == matrices  # what a check is told
    assert len(named) == len(set(named))


def test_the_traced_model_computes_the_score() -> None:
    model = unfused(small_spec())
    ids, targets = torch.randint(257, (2, 3, 32), generator=torch.Generator().manual_seed(0))
    traced = Capture(model, lambda name, value, ends: None).run(ids, targets)
    assert torch.equal(traced, model.score(ids, targets))  # type: ignore[operator]


def test_the_weights_are_read_when_it_runs_not_when_it_was_traced() -> None:
    model = unfused(small_spec())
    ids, targets = torch.randint(257, (2, 1, 32), generator=torch.Generator().manual_seed(0))
    capture = Capture(model, lambda name, value, ends: None)
    before = capture.run(ids, targets)
    with torch.no_grad():
        model.get_parameter("blocks.0.mlp.down").mul_(2)
    assert not torch.equal(capture.run(ids, targets), before)


def test_windows_are_as_many_as_asked_for_and_depend_on_the_seed_alone(stream: TokenStream) -> None:
    wanted = Calibrate(sequences=7, batch=3)

    def rows(seed: int) -> list[tuple[Tensor, Tensor]]:
        return list(calibration_windows(stream, wanted, 16, seed))

    first, again, other = rows(5), rows(5), rows(6)
    assert [ids.shape for ids, _ in first] == [(3, 16), (3, 16), (1, 16)]
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a[0], b[0]) for a, b in zip(first, other, strict=True))
    text = stream.read(0, stream.tokens).tolist()
    windows = [tuple(row) for ids, _ in first for row in ids.tolist()]
    assert len(set(windows)) == 7
    for ids, targets in first:
        assert torch.equal(ids[:, 1:], targets[:, :-1])
        for row in ids.tolist():
            assert any(text[start : start + 16] == row for start in range(len(text)))


class Counting:
    """0, 1, 2 ...: a window's first token is where it begins. Of so many tokens that a run has, in windows of 1,024."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.digest = tokens, f"{tokens:064x}"

    def read(self, start: int, count: int) -> npt.NDArray[np.uint16]:
        assert start >= 0 and start + count <= self.tokens
        return (np.arange(start, start + count) // 1024).astype(np.uint16)


def test_windows_see_all_parts_of_the_stream_whatever_the_seed() -> None:
    """64 of them in 32 equal parts: two in each, but where a start is just at an end. Seeds differ."""
    tokens, firsts = 40_500_000, set()
    for seed in range(300):
        windows = calibration_windows(Counting(tokens), Calibrate(sequences=64, batch=8), 16, seed)  # type: ignore[arg-type]
        starts = torch.cat([ids[:, 0] for ids, _ in windows]) * 1024
        reached = torch.bincount(starts * 32 // tokens, minlength=32)
        assert int(reached.min()) >= 1 and int(reached.max()) <= 3
        firsts.add(int(starts[0]))
    assert len(firsts) > 150  # of 617


@pytest.mark.parametrize("sequences", [1, 3, 50])
def test_the_last_window_ends_within_the_stream(sequences: int) -> None:
    for tokens in (33, 34, 60):
        for seed in range(20):
            result = calibration_windows(Counting(tokens), Calibrate(sequences=sequences), 32, seed)  # type: ignore[arg-type]
            assert sum(len(ids) for ids, _ in result) == sequences
    with pytest.raises(DataError, match="has 32 tokens; windows of length 32 need 33"):
        next(calibration_windows(Counting(32), Calibrate(), 32, 0))  # type: ignore[arg-type]


def test_one_batch_that_is_larger_than_all_is_cut(stream: TokenStream) -> None:
    batches = list(calibration_windows(stream, Calibrate(sequences=2, batch=50), 16, 0))
    assert [ids.shape[0] for ids, _ in batches] == [2]


def test_a_broken_model_is_named_by_its_first_bad_input(stream: TokenStream) -> None:
    spec = small_spec()
    assert spec.quant is not None
    model = unfused(spec)
    with torch.no_grad():
        model.get_parameter("blocks.0.mlp.up").fill_(float("nan"))
    with pytest.raises(QuantizeError, match=r"blocks\.0\.mlp\.down: the input contains NaN"):
        capture_hessians(model, calibration_windows(stream, spec.quant.calibrate, 32, 0), CPU)
