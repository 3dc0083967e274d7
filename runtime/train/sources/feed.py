"""Feeds. A feed provides batches, converts batches to arguments of the program `train`, and runs this program."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from specc.compiler.changing_values import Schedule
from specc.compiler.characters import START
from specc.compiler.programs.programs import Phase
from specc.runtime.data.lines.loader import PairLoader
from specc.runtime.data.windows.loader import Loader
from specc.runtime.decode.lines import decoder_inputs
from specc.runtime.optim.schedule import Moment

Program = Callable[..., Tensor]
Batch = tuple[Tensor, ...]


class Batches(Protocol):
    """A source of batches, with a position that can be saved and restored."""

    def next(self) -> Batch: ...

    def state(self) -> dict[str, int]: ...

    def restore(self, state: Mapping[str, int]) -> None: ...


class Feed(ABC):
    """Provides batches, and converts them to arguments of a backward pass.

    Attributes:
        names: the names of the inputs of the program `train`, in order.
        loader: the batches of this process.
    """

    names: ClassVar[tuple[str, ...]]
    loader: Batches

    @abstractmethod
    def arguments(self, batch: Batch, now: Moment, part: int, phase: Phase) -> Batch:
        """Returns the arguments of the method `loss` for one backward pass, on the device.

        Args:
            batch: the batch, on the device.
            now: the progress of the run at the update.
            part: the index of the backward pass in its update.
            phase: the phase of the run.
        """

    def of_scored(self, *inputs: Tensor) -> Batch:
        """Converts arguments of the program `score` to arguments of the program `train` for the same batch."""
        return inputs

    def loss(self, train: Program, *arguments: Tensor) -> Tensor:
        """Runs the program `train` on `arguments`, which the method `arguments` has returned.

        Returns the mean loss, f32 []. A CUDA graph may capture this call.
        """
        return train(*arguments)

    @abstractmethod
    def random_batch(self, shape: tuple[int, int], vocabulary: int, generator: torch.Generator) -> Batch:
        """Returns a batch of random tokens on the CPU; `shape` is (rows, window)."""

    @abstractmethod
    def counted(self) -> tuple[int | None, int]:
        """Returns the numbers of samples and tokens that all processes together have received.

        The number of samples is None for text.
        """

    def cropped_share(self) -> float | None:
        """Returns the fraction of document tokens that packing has dropped. None if documents are not packed into
        rows.
        """
        return None


class Windows(Feed):
    """A feed of text: token ids and targets, i64 [B, T].

    `tokens` is the number of tokens that all processes together receive per backward pass.
    """

    names = ("ids", "targets")

    def __init__(self, loader: Batches, tokens: int) -> None:
        self.loader, self._pass_tokens, self._tokens = loader, tokens, 0

    def arguments(self, batch: Batch, now: Moment, part: int, phase: Phase) -> Batch:
        self._tokens += self._pass_tokens
        return batch

    def random_batch(self, shape: tuple[int, int], vocabulary: int, generator: torch.Generator) -> Batch:
        return tuple(torch.randint(vocabulary, (2, *shape), generator=generator))

    def counted(self) -> tuple[int | None, int]:
        return None, self._tokens

    def cropped_share(self) -> float | None:
        return self.loader.cropped_share() if isinstance(self.loader, Loader) else None


class Forced(Feed):
    """A feed of line pairs (source, target, weight) with teacher forcing.

    The feed adds decoder inputs, i64 [B, T], to each batch. The inputs begin with the start token. At a forced
    position, the input is the previous target token. At any other position, the input is the token that the model
    predicts. Random numbers select the forced positions. The random numbers depend on the seed, the step, the sample
    and the position. They do not depend on the number of processes.

    Args:
        loader: the loader of the pairs.
        model: the model that predicts the tokens at unforced positions, with its current weights.
        probability: the probability that a position is forced, as a number or a schedule. None means 1.
        epoch: the number of samples per epoch.
        seed: the seed of the random numbers.
    """

    names = ("source", "inputs", "target")

    def __init__(
        self, loader: PairLoader, model: nn.Module, probability: float | Schedule | None, epoch: int, seed: int
    ) -> None:
        self.loader: PairLoader = loader
        self._model, self._schedule, self._epoch, self._seed = model, probability, epoch, seed

    def probability(self, now: Moment) -> float:
        schedule = self._schedule
        if not isinstance(schedule, Schedule):
            return 1.0 if schedule is None else schedule
        times = {"share": now.done, "step": now.step, "epoch": now.step * self.loader.rows / self._epoch}
        return float(schedule.value(times[schedule.by]))

    def arguments(self, batch: Batch, now: Moment, part: int, phase: Phase) -> Batch:
        source, target, weight = batch
        probability, step = self.probability(now), now.step
        if probability >= 1:
            return source, shifted(target), target, weight
        forcing = self._forced_positions(probability, step, part, target.shape[1]).to(target.device)
        return source, decoder_inputs(self._model, source, target, forcing, phase.writes), target, weight

    def of_scored(self, *inputs: Tensor) -> Batch:
        source, target = inputs
        return source, shifted(target), target

    def _forced_positions(self, probability: float, step: int, part: int, width: int) -> Tensor:
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
    """Returns decoder inputs that are all forced: the start token, then all target tokens except the last."""
    inputs = target.roll(1, dims=1)
    inputs[:, 0] = START
    return inputs
