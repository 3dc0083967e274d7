"""Feeds: batches, their conversion into the arguments of the program `train`, and the loss of a pass."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from specc.compiler.characters import START
from specc.compiler.programs.programs import Phase
from specc.compiler.spec.train import ForcingSpec
from specc.runtime.data.lines.loader import PairLoader
from specc.runtime.decode.lines import decoder_inputs

Program = Callable[..., Tensor]
Batch = tuple[Tensor, ...]


class Batches(Protocol):
    """A source of batches. Its position can be saved and restored."""

    def next(self) -> Batch: ...

    def state(self) -> dict[str, int]: ...

    def restore(self, state: Mapping[str, int]) -> None: ...


class Feed(ABC):
    """Batches, and their conversion into the inputs of micro-batches.

    Attributes:
        names: the inputs of the program `train`, in order.
        loader: the batches of this process.
    """

    names: ClassVar[tuple[str, ...]]
    loader: Batches

    @abstractmethod
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

    def loss(self, train: Program, *arguments: Tensor) -> Tensor:
        """Returns the loss of a pass, f32 [], given its `arguments`. May be captured in a CUDA graph, with the
        arguments at fixed addresses."""
        return train(*arguments)

    @abstractmethod
    def random_batch(self, shape: tuple[int, int], vocabulary: int, generator: torch.Generator) -> Batch:
        """Returns a batch of random tokens on the CPU; `shape` is (rows, window)."""

    @abstractmethod
    def counted(self) -> tuple[int | None, int]:
        """Returns the samples and tokens supplied so far to all ranks. Samples are None if steps are counted in tokens
        alone."""


class Windows(Feed):
    """Batches of text. The program accepts ids and targets, i64 [B, T], unchanged; a step has `tokens` tokens."""

    names = ("ids", "targets")

    def __init__(self, loader: Batches, tokens: int) -> None:
        self.loader, self._step_tokens, self._tokens = loader, tokens, 0

    def arguments(self, batch: Batch, step: int, part: int, phase: Phase) -> Batch:
        self._tokens += self._step_tokens if part == 0 else 0
        return batch

    def random_batch(self, shape: tuple[int, int], vocabulary: int, generator: torch.Generator) -> Batch:
        return tuple(torch.randint(vocabulary, (2, *shape), generator=generator))

    def counted(self) -> tuple[int | None, int]:
        return None, self._tokens


class Forced(Feed):
    """Batches of pairs with teacher forcing: (source, target, weight) become (source, inputs, target, weight).

    `inputs`, i64 [B, T], are the decoder inputs: the start token, then the target's tokens except the last. At
    positions where the truth is not forced, the input is the token that the model itself predicts, by the programs of
    the current phase. Each position of each sample is drawn independently: position t of sample k of the step uses
    number k * T + t of SHAKE-256("specc forcing {seed} {step}"), read as little-endian u32. The truth is forced if that
    number is below the probability times 2 ** 32. The result therefore does not depend on the number of ranks.

    Args:
        loader: the loader of the pairs.
        model: predicts the tokens at unforced positions, with its current weights.
        schedule: the probability of the truth. None for 1 throughout.
        epoch: samples per epoch.
        seed: the seed of the draws.
    """

    names = ("source", "inputs", "target")

    def __init__(
        self, loader: PairLoader, model: nn.Module, schedule: ForcingSpec | None, epoch: int, seed: int
    ) -> None:
        self.loader: PairLoader = loader
        self._model, self._schedule, self._epoch, self._seed = model, schedule, epoch, seed

    def probability(self, step: int) -> float:
        """Returns the probability that a position receives the truth, in the update after `step` others."""
        schedule = self._schedule
        if schedule is None:
            return 1.0
        return forced_at(schedule, step if schedule.by == "step" else step * self.loader.rows / self._epoch)

    def arguments(self, batch: Batch, step: int, part: int, phase: Phase) -> Batch:
        source, target, weight = batch
        probability = self.probability(step)
        if probability >= 1:
            return source, shifted(target), target, weight
        forcing = self._forced_positions(probability, step, part, target.shape[1]).to(target.device)
        return source, decoder_inputs(self._model, source, target, forcing, phase.writes), target, weight

    def _forced_positions(self, probability: float, step: int, part: int, width: int) -> Tensor:
        """Returns the forced positions of this rank's rows, bool [B, T]."""
        digest = hashlib.shake_256(f"specc forcing {self._seed} {step}".encode()).digest(4 * self.loader.rows * width)
        forced = np.frombuffer(digest, "<u4").reshape(-1, width) < probability * 2**32
        return torch.from_numpy(np.ascontiguousarray(forced[self.loader.local_rows(part)]))

    def loss(self, train: Program, *arguments: Tensor) -> Tensor:
        source, inputs, target, weight = arguments
        return train(source, inputs, target) * weight

    def random_batch(self, shape: tuple[int, int], vocabulary: int, generator: torch.Generator) -> Batch:
        source, target = torch.randint(vocabulary, (2, *shape), generator=generator)
        return source, target, torch.ones(())

    def counted(self) -> tuple[int | None, int]:
        return self.loader.samples, self.loader.tokens


def shifted(target: Tensor) -> Tensor:
    """Returns the decoder inputs under full teacher forcing: the start token, then the target's tokens except
    the last."""
    inputs = target.roll(1, dims=1)
    inputs[:, 0] = START
    return inputs


def forced_at(schedule: ForcingSpec, when: float) -> float:
    """Returns the probability of the truth at `when`, a step or a fractional epoch."""
    points = schedule.points
    after = bisect_right(points, when, key=lambda point: point[0])
    start, value = points[after - 1]
    if schedule.between == "hold" or after == len(points):
        return value
    end, next_value = points[after]
    return value + (next_value - value) * (when - start) / (end - start)
