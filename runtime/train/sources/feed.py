"""Feeds: convert batches into the arguments of the program `train`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from specc.compiler.characters import START
from specc.compiler.programs.programs import Phase
from specc.compiler.spec.train import ForcingSpec
from specc.runtime.data.lines.loader import PairLoader
from specc.runtime.decode.lines import fed

Program = Callable[..., Tensor]
Batch = tuple[Tensor, ...]


class Batches(Protocol):
    """A source of batches. Its position can be saved and restored."""

    def next(self) -> Batch: ...

    def state(self) -> dict[str, int]: ...

    def restore(self, state: Mapping[str, int]) -> None: ...

    def close(self) -> None: ...


class Feed(Protocol):
    """Converts batches into the inputs of a micro-batch. `names` are the inputs of the program `train`, in order."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def arguments(self, batch: Batch, step: int, part: int, phase: Phase) -> Batch:
        """Returns the arguments of one pass.

        Args:
            batch: the batch, on the device.
            step: the number of updates before this one.
            part: the index of the pass in its update.
            phase: the phase of the run.

        Returns:
            The arguments of the pass, on the device.
        """
        ...

    def loss(self, train: Program, *arguments: Tensor) -> Tensor:
        """Returns the loss of a pass, f32 [], given its `arguments`. May be captured in a CUDA graph, with the
        arguments at fixed addresses."""
        ...

    def random_batch(self, shape: tuple[int, int], vocabulary: int, generator: torch.Generator) -> Batch:
        """Returns a batch of random tokens on the CPU; `shape` is (rows, window)."""
        ...

    def counted(self) -> tuple[int | None, int]:
        """Returns the samples and tokens supplied so far to all ranks. Samples are None if steps are counted in tokens
        alone."""
        ...


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Batches, and the feed that converts them into arguments."""

    loader: Batches
    feed: Feed


class Windows:
    """Batches of text. The program accepts ids and targets, i64 [B, T], unchanged; a step has `tokens` tokens."""

    names = ("ids", "targets")

    def __init__(self, tokens: int) -> None:
        self._tokens, self._given = tokens, 0

    def arguments(self, batch: Batch, step: int, part: int, phase: Phase) -> Batch:
        self._given += self._tokens if part == 0 else 0
        return batch

    def loss(self, train: Program, *arguments: Tensor) -> Tensor:
        return train(*arguments)

    def random_batch(self, shape: tuple[int, int], vocabulary: int, generator: torch.Generator) -> Batch:
        return tuple(torch.randint(vocabulary, (2, *shape), generator=generator))

    def counted(self) -> tuple[int | None, int]:
        return None, self._given


class Forced:
    """Batches of pairs with teacher forcing: (source, target, weight) become (source, inputs, target, weight).

    `inputs`, i64 [B, T], are the decoder inputs: the start token, then the target's tokens except the last. At
    positions where the truth is not forced, the input is the token that the model itself predicts, by the programs of
    the current phase. Each position of each sample is drawn independently: position t of sample k of the step uses
    number k * T + t of SHAKE-256("specc forcing {seed} {step}"), read as little-endian u32. The truth is forced if that
    number is below the probability times 2 ** 32. The result therefore does not depend on the number of ranks.

    Args:
        model: predicts the tokens at unforced positions, with its current weights.
        schedule: the probability of the truth. None for 1 throughout.
        epoch: samples per epoch.
        seed: the seed of the draws.
        loader: the loader of the pairs.
    """

    names = ("source", "inputs", "target")

    def __init__(
        self, model: nn.Module, schedule: ForcingSpec | None, epoch: int, seed: int, loader: PairLoader
    ) -> None:
        self._model, self._schedule, self._epoch, self._seed, self._loader = model, schedule, epoch, seed, loader

    def probability(self, step: int) -> float:
        """Returns the probability that a position receives the truth, in the update after `step` others."""
        if self._schedule is None:
            return 1.0
        return forced_at(
            self._schedule, step if self._schedule.by == "step" else step * self._loader.rows / self._epoch
        )

    def arguments(self, batch: Batch, step: int, part: int, phase: Phase) -> Batch:
        source, target, weight = batch
        probability = self.probability(step)
        if probability >= 1:
            return source, shifted(target), target, weight
        forcing = torch.from_numpy(self._drawn(probability, step, part, target.shape[1])).to(target.device)
        return source, fed(self._model, source, target, forcing, phase.writes), target, weight

    def _drawn(
        self, probability: float, step: int, part: int, width: int
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Returns the forced positions of this rank's rows, bool [B, T]."""
        count = self._loader.rows * width
        words = hashlib.shake_256(f"specc forcing {self._seed} {step}".encode()).digest(4 * count)
        forced = np.frombuffer(words, "<u4").reshape(-1, width) < probability * 2**32
        return np.ascontiguousarray(forced[self._loader.local_rows(part)])

    def loss(self, train: Program, *arguments: Tensor) -> Tensor:
        source, inputs, target, weight = arguments
        return train(source, inputs, target) * weight

    def random_batch(self, shape: tuple[int, int], vocabulary: int, generator: torch.Generator) -> Batch:
        source, target = torch.randint(vocabulary, (2, *shape), generator=generator)
        return source, target, torch.ones(())

    def counted(self) -> tuple[int | None, int]:
        return self._loader.samples, self._loader.tokens


def shifted(target: Tensor) -> Tensor:
    """Returns the decoder inputs under full teacher forcing: the start token, then the target's tokens except
    the last."""
    inputs = target.roll(1, dims=1)
    inputs[:, 0] = START
    return inputs


def forced_at(schedule: ForcingSpec, when: float) -> float:
    """Returns the probability of the truth at `when`, a step or a fractional epoch."""
    points = schedule.points
    after = next((i for i, (start, _) in enumerate(points) if start > when), len(points))
    start, value = points[after - 1]
    if schedule.between == "hold" or after == len(points):
        return value
    end, coming = points[after]
    return value + (coming - value) * (when - start) / (end - start)
