"""A process of test_distributed.py: each process of a world runs this file and prints one JSON object.

usage: world_scenes.py FOLDER [turn], in the environment of torchrun. The last scene ends in a failure of rank 1; with
`turn`, the only one is a failure of rank 0 in its turn.
"""

import json
import os
import random
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from run_samples import gpt_mini
from toy import Toy, Watch, stream, train_spec, trainer

from specc.compiler.spec.precision import LossScaleSpec, PrecisionSpec
from specc.compiler.spec.train import TrainSpec
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.distributed.signals import Preempted
from specc.runtime.distributed.world import World, joined
from specc.runtime.errors import IntegrityError, RunFailure
from specc.runtime.log import Reporter, RunLog, Silence, Step
from specc.runtime.metrics.validation import Validation
from specc.runtime.storage import checkpoint
from specc.runtime.storage.checkpoint import latest
from specc.runtime.storage.run_directory import Run
from specc.runtime.train import clock
from specc.runtime.train.loop import Limits, Loop, TrainResult
from specc.runtime.train.trainer import Trainer

TRAIN = train_spec(tokens_per_step=8 * 8, validate_every=7)


def loop(folder: Path, name: str, world: World, train: TrainSpec, **more: Any) -> TrainResult:
    run = Run(folder / name, gpt_mini(), "cpu", "text")
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    run_trainer = trainer(folder, train, more.get("model", Toy(noise=0.0)), world=world)
    log: RunLog | Silence = RunLog(run.log) if world.rank == 0 else Silence()
    validation = Validation(stream(folder, "val"), ByteTokenizer(), 8, 500)
    watch = Watch(more.get("hook"))
    try:
        reporter, save = Reporter(log, watch, lambda text: None), partial(checkpoint.save, run.checkpoints)
        return Loop(run, run_trainer, validation, reporter, more.get("limits", Limits()), save).run()
    finally:
        run_trainer.loader.close()


def calls(folder: Path, world: World) -> dict[str, Any]:
    """Each collective call once."""
    tensor = torch.arange(3.0) + world.rank
    world.add(tensor)
    with world.in_turn("calls"):
        went_second = (folder / "turn").exists()
        (folder / "turn").touch()
    return {
        "add": tensor.tolist(),
        "totals": world.totals(np.array([1.0, 0.5 + world.rank])).tolist(),
        "most": world.most(world.rank, -world.rank, 0.25),
        "first": world.first(lambda: f"by {world.rank}"),
        "went_second": went_second,
    }


def gradients(folder: Path, world: World) -> dict[str, Any]:
    """The loss and norm of the first of four steps, and the weights and the optimizers' state after the last, summed in
    float64."""
    trainer_of_rank = trainer(folder, TRAIN, Toy(noise=0.0), world=world)
    steps = [step for _ in range(4) for step in trainer_of_rank.advance()]
    trainer_of_rank.require_same()
    trainer_of_rank.gather()
    trainer_of_rank.loader.close()
    detached = {
        name: tensor.detach()
        for name, tensor in {**trainer_of_rank.masters.tensors, **trainer_of_rank.optimizers.state()}.items()
    }
    sums = {
        name: [float(trainer_of_rank.double().norm()), float(trainer_of_rank.double().sum())]
        for name, trainer_of_rank in detached.items()
    }
    losses, norms = [step.loss for step in steps], [step.grad_norm for step in steps]
    return {"micro_batches": trainer_of_rank.micro_batches, "losses": losses, "norms": norms, "sums": sums}


def scores(folder: Path, world: World) -> dict[str, Any]:
    """Validation of a part that does not divide evenly."""
    trainer_of_rank = trainer(folder, TRAIN, Toy(noise=0.0), world=world)
    results = []
    for tokens in (500, 3):
        result = trainer_of_rank.evaluate(Validation(stream(folder, "val"), ByteTokenizer(), 4, tokens))
        results.append([result.nats, result.tokens, result.piece_bytes])
    return {"scores": results}


def clocks(folder: Path, world: World) -> dict[str, Any]:
    """Rank 1's clock runs at twice the speed: rank 0's says what the multipliers are and when the run ends."""
    now = [0.0]

    def tick(step: Step) -> None:
        now[0] += 0.01 * (1 + world.rank)

    real = clock.time
    clock.time = SimpleNamespace(perf_counter=lambda: now[0])  # type: ignore[assignment,attr-defined]
    multipliers: list[float] = []

    def note(step: Step) -> None:
        tick(step)
        multipliers.append(step.lr)

    try:
        train = train_spec(steps=None, budget_seconds=0.295, schedule={"warmdown_steps": 10}, tokens_per_step=64)
        result = loop(folder, "clocks", world, train, hook=note)
    finally:
        clock.time = real  # type: ignore[attr-defined]
    return {"step": result.step, "multipliers": multipliers}


def ends(folder: Path, world: World) -> dict[str, Any]:
    """`--max-seconds`: each rank would end at another step by its own clock."""
    result = loop(folder, "ends", world, TRAIN.model_copy(update={"steps": 2000}), limits=Limits(seconds=0.3))
    return {"step": result.step, "complete": result.complete}


def stops(folder: Path, world: World) -> dict[str, Any]:
    """A signal to rank 1 alone, between steps and within validation."""
    results = []
    model = Toy(noise=0.0)
    score = model.score

    def signalled() -> None:
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def during(*args: Any) -> Any:
        signalled()
        return score(*args)

    def hook(step: Step) -> None:
        if step.step == 5:
            signalled()

    for name, between, scored in (("between", hook, score), ("within", None, during)):
        model.score = scored  # type: ignore[method-assign]
        try:
            loop(folder, name, world, TRAIN, hook=between, model=model)
        except Preempted as stop:
            newest = latest(folder / name / "checkpoints", print)
            results.append([newest.name if newest else None, stop.hint])
    return {"stops": results}


def reports(folder: Path, world: World) -> dict[str, Any]:
    """A loss that is not finite on rank 1 alone stops all at that step."""
    model = Toy(noise=0.0)

    def hook(step: Step) -> None:
        if world.rank == 1 and step.step == 3:
            model.spoil = lambda loss: loss * float("nan")

    try:
        loop(folder, "reports", world, TRAIN, hook=hook, model=model)
    except RunFailure as failure:
        return {"failure": failure.message}
    return {}


def differs(folder: Path, world: World) -> dict[str, Any]:
    """One weight of rank 1 is another by its last bit."""
    trainer_of_rank = trainer(folder, TRAIN, Toy(noise=0.0), world=world)
    trainer_of_rank.require_same()
    if world.rank == 1:
        with torch.no_grad():
            bits = trainer_of_rank.masters.tensors["blocks.up"].view(torch.int32)
            bits[3, 5] += 1
    try:
        trainer_of_rank.require_same()
    except RunFailure as failure:
        return {"differs": failure.message}
    return {}


def skips(folder: Path, world: World) -> dict[str, Any]:
    """A gradient that overflows on rank 1 alone: all ranks skip the step and lower the loss scale."""
    model = Toy(noise=0.0)
    train = TRAIN.model_copy(update={"precision": PrecisionSpec(loss_scale=LossScaleSpec(initial=64.0))})
    trainer_of_rank = trainer(folder, train, model, world=world)
    results = []
    for step in range(4):
        model.spoil = partial(torch.mul, torch.tensor(float("inf") if step == 2 and world.rank else 1.0))
        results += [[each.step, each.skipped, each.loss_scale] for each in trainer_of_rank.advance()]
    trainer_of_rank.require_same()
    trainer_of_rank.loader.close()
    return {"skips": results}


AFTER, STOPS = 50, 20  # steps that are compared after each stop; the stops


def resumes(folder: Path, world: World) -> dict[str, Any]:
    """A run that stops at each of some steps and resumes from its checkpoint in a new trainer: whether the losses of
    the next steps, and the samples that this rank trains on, are those of the run that never stopped."""
    train = train_spec(steps=STOPS + AFTER + 10, tokens_per_step=8 * 8)

    def advanced(trainer_of_rank: Trainer, count: int) -> tuple[list[str], list[list[int]]]:
        seen: list[list[int]] = []
        given = trainer_of_rank.feed.arguments

        def arguments(batch: Any, *more: Any) -> Any:
            seen.append(batch[0].flatten().tolist())
            return given(batch, *more)

        trainer_of_rank.feed.arguments = arguments  # type: ignore[method-assign]
        losses = [step.loss.hex() for _ in range(count) for step in trainer_of_rank.advance()]
        trainer_of_rank.feed.arguments = given  # type: ignore[method-assign]
        return losses, seen

    def fresh() -> Trainer:
        return trainer(folder, train, Toy(), world=world)

    whole = fresh()
    losses, samples = advanced(whole, STOPS + AFTER)
    whole.loader.close()
    each = len(samples) // (STOPS + AFTER)
    results = []
    for stop in random.Random(28).sample(range(1, STOPS + 1), STOPS):
        first = fresh()
        advanced(first, stop)
        first.gather()
        path = world.first(
            lambda stop=stop, first=first: checkpoint.save(folder / f"{world.size}_stop{stop}", first.snapshot())
        )
        first.loader.close()
        torch.manual_seed(999)
        second = fresh()
        second.restore(checkpoint.load(path))
        again, taken = advanced(second, AFTER)
        second.loader.close()
        same_samples = taken == samples[each * stop : each * (stop + AFTER)]
        results.append([stop, again == losses[stop : stop + AFTER], same_samples, len(again)])
    return {"resumed": results, "different": len(set(losses)), "samples": len({str(s) for s in samples})}


SCENES = (calls, gradients, scores, clocks, ends, stops, reports, differs, skips, resumes)


def turn() -> None:
    with joined() as world, world.in_turn("fails"):
        if world.rank == 0:
            raise IntegrityError("the disk of this host is damaged")


def main(folder: Path) -> None:
    stream(folder)
    with joined() as world:
        results = {}
        for scene in SCENES:
            results[scene.__name__] = scene(folder, world)
            world.wait()
        print(json.dumps(results), flush=True)
        if world.rank == 1:
            raise IntegrityError("the disk of this host is damaged")
        world.wait()


if __name__ == "__main__":
    turn() if sys.argv[2:] else main(Path(sys.argv[1]))
