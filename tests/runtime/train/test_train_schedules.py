"""Runs with a schedule of every kind resume exactly before, at and after each change."""

from pathlib import Path
from typing import Any

import pytest
import torch
from run_samples import small_spec, write_text
from test_train_context import saved, trained

from specc.runtime.model.load import instantiate

STEPS = 8
# Each changes after a step of its own: a schedule, and the same number without it.
SCHEDULES = {
    "lr": ("train.optimizers.1.lr={at: [[0, 0.02], [0.125, 0.01]], between: step}", "train.optimizers.1.lr=0.02"),
    "lr formula": ('train.optimizers.2.lr="0.01 * (1 - t) ** 2"', "train.optimizers.2.lr=0.01"),
    "momentum": (
        "train.optimizers.0.momentum={at: [[0, 0.8], [5, 0.95]], by: step}",
        "train.optimizers.0.momentum=0.8",
    ),
    "decay of muon": (
        "train.optimizers.0.weight_decay={at: [[0, 0.2], [0.5, 0.2], [1, 0]]}",
        "train.optimizers.0.weight_decay=0.2",
    ),
    "decay of adamw": ('train.optimizers.1.weight_decay="0.3 * t"', "train.optimizers.1.weight_decay=0"),
    "loss": (
        "train.losses=[{kind: next_token}, {kind: z, weight: {at: [[0, 0.01], [0.375, 0]]}}]",
        "train.losses=[{kind: next_token}, {kind: z, weight: 0.01}]",
    ),
    "batch": ("train.tokens_per_step={at: [[0, 128], [0.625, 256]]}", "train.tokens_per_step=128"),
    "context": ("train.context={at: [[0, 16], [0.75, 32]]}", "train.context=16"),
    "order": ("model.blocks.order={at: [[0, 0..1], [0.25, 0 0..1]]}", "model.blocks.order=0..1"),
    "mask": (
        "model.blocks.layers.0.mask={at: [[0, j <= i and i - j < 4], [0.875, j <= i and i - j < 8]]}",
        "model.blocks.layers.0.mask=j <= i and i - j < 4",
    ),
    "softcap": ("model.head.softcap={at: [[0, 30], [0.5, 8]]}", "model.head.softcap=30"),
    "warm-down": ("train.schedule={warmup_steps: 2, shape: cosine, floor: 0.1}", "train.schedule={warmup_steps: 2}"),
}


def spec_of(*chosen: str) -> Any:
    settings = (texts[name not in chosen] for name, texts in SCHEDULES.items())
    return small_spec(f"train.steps={STEPS}", *settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("schedules")
    write_text(folder / "data")
    return trained(folder / "whole", spec_of(*SCHEDULES), str(folder / "data")), folder


@pytest.mark.parametrize("stop", range(1, STEPS, 2))
def test_a_run_with_every_schedule_resumes_exactly(stop: int, whole: tuple[Any, Path]) -> None:
    result, folder = whole
    spec, data = spec_of(*SCHEDULES), str(folder / "data")
    trained(folder / f"stop{stop}", spec, data, stop)
    resumed = trained(folder / f"stop{stop}", spec, data, resume=True)
    assert resumed.raw.record() == result.raw.record()
    want, have = saved(result), saved(resumed)
    for name, tensor in want.weights.items():
        assert torch.equal(have.weights[name], tensor), name
    for name, tensor in want.optimizer.items():
        assert torch.equal(have.optimizer[name], tensor), name


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_schedule_changes_the_run(name: str, whole: tuple[Any, Path]) -> None:
    """So that a run that ignored it would not resume exactly by chance."""
    result, folder = whole
    others = [other for other in SCHEDULES if other != name]
    without = saved(trained(folder / name, spec_of(*others), str(folder / "data"))).weights
    want = saved(result).weights
    assert any(not torch.equal(without[path], want[path]) for path in want)


def mask_of(window: int) -> str:
    return f"j <= i and i - j < {window}"


CHANGED = "model.blocks.changes=[{where: layer == 1, attention: {mask: MASK}}]"


@pytest.mark.parametrize("place", ["model.blocks.layers.0.mask=MASK", CHANGED], ids=["all layers", "one layer"])
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
def test_each_phase_is_the_model_with_its_values(place: str, fuse: bool, tmp_path: Path) -> None:
    """Losses, scores and gradients of every phase are those of a spec that has its values throughout."""
    values = ((4, 30.0), (8, 20.0), (16, 20.0))
    points = zip((0, 0.3, 0.6), (mask_of(width) for width, _ in values), strict=True)
    mask, cap = f"{{at: [{', '.join(f'[{at}, {mask}]' for at, mask in points)}]}}", "{at: [[0, 30], [0.3, 20]]}"
    changing = small_spec("train.steps=8", place.replace("MASK", mask), f"model.head.softcap={cap}")
    loaded = instantiate(changing, "cpu", tmp_path / "changing", fuse)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    phases = (*((phase.train, phase.score) for phase in loaded.programs.phases), ("forward", "score"))
    assert len(phases) == 3
    ids, targets = torch.randint(257, (2, 3, 32), generator=generator)
    losses = []
    for i, ((run, score), (width, limit)) in enumerate(zip(phases, values, strict=True)):
        plain = small_spec("train.steps=8", place.replace("MASK", mask_of(width)), f"model.head.softcap={limit}")
        other = instantiate(plain, "cpu", tmp_path / f"plain{i}", fuse)
        other.model.load_state_dict(loaded.model.state_dict())
        assert torch.equal(getattr(loaded.model, score)(ids, targets), other.model.score(ids, targets))  # type: ignore[operator]
        for module, function in ((loaded.model, getattr(loaded.model, run)), (other.model, other.model)):
            module.zero_grad()
            losses.append(function(ids, targets))
            losses[-1].backward()
        assert losses[-2].item() == losses[-1].item()
        pairs = zip(loaded.model.parameters(), other.model.parameters(), strict=True)
        assert all(torch.equal(left.grad, two.grad) for left, two in pairs if left.grad is not None)
    assert len({loss.item() for loss in losses}) == 3
