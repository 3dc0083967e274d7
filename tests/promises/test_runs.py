"""Training that is disturbed at random moments: it stops at once, says why, and goes on exactly."""

import math
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiers import Trials, tiers
from toy import Toy, train_spec
from toy_runs import go, losses

from specc.runtime.data.errors import DataIntegrityError
from specc.runtime.distributed.signals import Preempted
from specc.runtime.errors import RunFailure
from specc.runtime.log import Step
from specc.runtime.storage import checkpoint

STEPS = 20


def weights(folder: Path, name: str) -> dict[str, bytes]:
    path = folder / name / "checkpoints" / f"step_{STEPS:08d}"
    return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix == ".safetensors"}


def newest(folder: Path, name: str) -> int:
    """The step of the newest checkpoint, which must be whole and finite."""
    path = checkpoint.latest(folder / name / "checkpoints", lambda text: pytest.fail(text))
    if path is None:
        return 0
    loaded = checkpoint.load(path)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in loaded.weights.values())
    return loaded.step


@tiers("C27", truncations=(3, 20))
def test_a_shard_that_is_cut_while_it_is_read_is_an_error(trials: Trials, tmp_path: Path) -> None:
    """Not a signal. With the shard whole again, the run goes on exactly."""
    train, chance = train_spec(checkpoint_every=5), random.Random(27)
    go(tmp_path, "whole", train)
    (shard,) = tmp_path.glob("cache/train-*/*.bin")
    content = shard.read_bytes()
    for number in range(trials["truncations"]):
        at, size = chance.randint(1, 15), chance.choice([0, 4, 1024, chance.randrange(2000)])

        def cut(step: Step, at: int = at, size: int = size) -> None:
            if step.step == at:
                os.truncate(shard, size)

        with pytest.raises(DataIntegrityError) as raised:
            go(tmp_path, f"cut {number}", train, cut)
        assert raised.value.exit_code == 5
        shard.write_bytes(content)
        go(tmp_path, f"cut {number}", train)
        assert weights(tmp_path, f"cut {number}") == weights(tmp_path, "whole")


@tiers("C28", random_stops=(3, 20))
def test_a_run_that_was_stopped_goes_on_exactly(trials: Trials, tmp_path: Path) -> None:
    """One process. The losses of all later steps are equal bit for bit, and the weights at the end."""
    go(tmp_path, "whole")
    chance = random.Random(28)
    for number in range(trials["random_stops"]):
        stops = sorted(chance.sample(range(1, STEPS), chance.randint(1, 3)))

        def stop(step: Step, stops: list[int] = stops) -> None:
            if stops and step.step == stops[0]:
                stops.pop(0)
                os.kill(os.getpid(), signal.SIGTERM)

        while stops:
            with pytest.raises(Preempted):
                go(tmp_path, f"stopped {number}", hook=stop)
        go(tmp_path, f"stopped {number}")
        assert losses(tmp_path, f"stopped {number}") == losses(tmp_path, "whole")
        assert weights(tmp_path, f"stopped {number}") == weights(tmp_path, "whole")


def strike(*_: object) -> None:
    """Sends SIGTERM to this process once the loop handles it; before, the command line does."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.setitimer(signal.ITIMER_REAL, 0.002)
    else:
        os.kill(os.getpid(), signal.SIGTERM)


@tiers("C30", signals=(3, 20))
def test_a_signal_at_any_moment_saves(trials: Trials, tmp_path: Path) -> None:
    """SIGTERM from a timer: within a step, a validation or a checkpoint. Exit code 75, in less than 30 seconds."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # else `strike` would send it before the loop handles it
    train, chance = train_spec(validate_every=4, checkpoint_every=3), random.Random(30)
    result = go(tmp_path, "whole", train)
    seconds = max(0.05, result.seconds)
    struck = 0
    for number in range(20 * trials["signals"]):
        if struck == trials["signals"]:
            break
        name = f"struck {number}"
        signal.signal(signal.SIGALRM, strike)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.01 + chance.random() * seconds)
            go(tmp_path, name, train)
        except Preempted as stop:
            struck += 1
            assert stop.exit_code == 75
            saved = newest(tmp_path, name)
            assert saved == len(losses(tmp_path, name))  # nothing was lost
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        go(tmp_path, name, train)
        assert weights(tmp_path, name) == weights(tmp_path, "whole")
    assert struck == trials["signals"]


@tiers("C37", points=(3, 10))
def test_full_gpu_memory_at_any_step_names_what_to_lower(trials: Trials, tmp_path: Path) -> None:
    """torch's error is raised in the forward pass, the backward pass, or validation, as the allocator raises it."""

    def full(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    train, chance = train_spec(checkpoint_every=3, validate_every=50), random.Random(37)
    go(tmp_path, "whole", train)
    for number in range(trials["points"]):
        model, at, backward = Toy(), chance.randint(1, 17), number % 2 == 1

        def hook(step: Step, model: Toy = model, at: int = at, backward: bool = backward) -> None:
            if step.step == at and backward:
                model.blocks.up.register_hook(full)
            elif step.step == at:
                model.spoil = full

        with pytest.raises(RunFailure, match=f"step {at + 1}: out of GPU memory") as raised:
            go(tmp_path, f"{number}", train, hook, model=model)
        assert raised.value.exit_code == 4 and "train.micro_batch" in raised.value.hint
        assert newest(tmp_path, f"{number}") == at - at % 3
        go(tmp_path, f"{number}", train)
        assert weights(tmp_path, f"{number}") == weights(tmp_path, "whole")


def spoil_loss(model: Toy, value: float) -> None:
    model.spoil = lambda loss: loss * value


def in_gradient(name: str) -> Callable[[Toy, float], None]:
    def spoil(model: Toy, value: float) -> None:
        def planted(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            gradient.flatten()[3] = value
            return gradient

        model.get_parameter(name).register_hook(planted)

    return spoil


NAMES = ("embed", "blocks.up", "blocks.down", "blocks.gain")
PLACES: dict[str, tuple[Callable[[Toy, float], None], str]] = {
    "loss": (spoil_loss, ""),
    **{name: (in_gradient(name), name) for name in NAMES},
}


@tiers("C38", places_and_values=(10, 10))
def test_a_value_that_is_not_finite_stops_the_run_at_that_step(trials: Trials, tmp_path: Path) -> None:
    """NaN and infinity in the loss and in one element of each gradient: the parameter is named, the last good
    checkpoint stays, and the run goes on from it."""
    train = train_spec(checkpoint_every=4)
    go(tmp_path, "whole", train)
    planted = [(place, value) for place in PLACES for value in (math.nan, math.inf)]
    assert len(planted) == trials["places_and_values"]
    for number, (place, value) in enumerate(planted):
        model, (spoil, named) = Toy(), PLACES[place]

        def hook(
            step: Step, model: Toy = model, spoil: Callable[[Toy, float], None] = spoil, value: float = value
        ) -> None:
            if step.step == 9:
                spoil(model, value)

        with pytest.raises(RunFailure, match=r"step 10: the loss is") as raised:
            go(tmp_path, f"{number}", train, hook, model=model)
        assert raised.value.exit_code == 4
        if named:
            assert f"with NaN or infinity is {named}" in raised.value.message, (place, raised.value.message)
        assert newest(tmp_path, f"{number}") == 8
        go(tmp_path, f"{number}", train)
        assert weights(tmp_path, f"{number}") == weights(tmp_path, "whole")
