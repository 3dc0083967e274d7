"""Training on pairs of lines, from a file or from a task that generates them. Validation computes exact match."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specc.compiler.spec.data.lines import file_settings
from specc.compiler.spec.spec import Spec
from specc.compiler.spec.train import ExactMatchSpec
from specc.runtime.data.errors import DataError
from specc.runtime.data.lines.line_file import LineFile
from specc.runtime.data.lines.loader import FixedSet, FreshSamples, PairLoader
from specc.runtime.data.lines.pairs import Pairs, lengths
from specc.runtime.data.lines.task import LineStream, task_of
from specc.runtime.data.tokenizers.characters import CharTokenizer
from specc.runtime.data.tokenizers.from_spec import characters_of
from specc.runtime.distributed.world import World
from specc.runtime.metrics.exact_match import PairValidation
from specc.runtime.model.load import Loaded, device_of
from specc.runtime.storage.data_digests import DataDigests
from specc.runtime.train.sources.feed import Feed, Forced
from specc.runtime.train.sources.micro_batches import micro_batches
from specc.runtime.train.sources.source import Epoch, OpenData, Source, Supply


class Lines(Source):
    """Pairs of lines, from the file that `--data` names or from the task in the spec.

    The run directory contains no copy of the lines.
    """

    name = "lines"

    def __init__(self, spec: Spec, search: Sequence[Path]) -> None:
        self._spec, self._tokenizer = spec, characters_of(spec)

    def open(self, data: str, cache: Path, stack: ExitStack) -> OpenData:
        """Generates the lines if `data` is the name of the task in the spec. Otherwise, the method reads the file
        `data`, and holds out a part of its lines for validation.
        """
        spec, tokenizer, width = self._spec, self._tokenizer, self._spec.model.window
        task = task_of(spec.train.data)
        assert isinstance(spec.eval, ExactMatchSpec)
        if task is not None and data == task.name:
            scored = task.held_out(task.splits[0], spec.eval.lines)
            digests = DataDigests(train=task.training.digest, val=scored.digest)
            train, val = (Pairs.of(lines, tokenizer, width) for lines in (task.training, scored))
            return _OpenLines(spec, tokenizer, train, val, digests, task.stream() if task.fresh else None)
        if task is not None and task.fresh:
            raise DataError("`fresh: true` needs a generator of lines, but the data is a file", "train without --data")
        file = LineFile.read(data, file_settings(spec.train.data), tokenizer, width)
        file.require_both_splits()
        return _OpenLines(spec, tokenizer, file.train, file.val, file.digests)

    @staticmethod
    def drill(spec: Spec, loaded: Loaded, batches: int, stack: ExitStack) -> Feed:
        window, tokenizer = spec.model.window, characters_of(spec)
        task, count = task_of(spec.train.data), batches * spec.train.rows(window)
        pairs = Pairs.of(task.first(count), tokenizer, window) if task else Pairs.random(count, tokenizer, window)
        digests = DataDigests(train=pairs.digest, val=pairs.digest)
        world = World.alone().on(torch.device(device_of(loaded.target)))
        return _OpenLines(spec, tokenizer, pairs, pairs, digests).supply(loaded, world, stack).feed


@dataclass(frozen=True, slots=True)
class _OpenLines:
    spec: Spec
    tokenizer: CharTokenizer
    train: Pairs
    val: Pairs
    digests: DataDigests
    stream: LineStream | None = None

    @property
    def epoch(self) -> Epoch | None:
        return Epoch(len(self.train), self.val)

    def supply(self, loaded: Loaded, world: World, stack: ExitStack) -> Supply:
        plan, window = self.spec.train, self.spec.model.window
        samples = (
            FixedSet(self.train, plan.seed, world.device)
            if self.stream is None
            else FreshSamples(self.stream, self.tokenizer, window)
        )
        rows, passes = plan.at_once(world.size), micro_batches(plan, window, world.size)
        loader = stack.enter_context(PairLoader(samples, rows, passes, world.device, world.rank, world.size))
        feed = Forced(loader, loaded.model, plan.teacher_forcing, len(self.train), plan.seed)
        validation = PairValidation(self.val.within(plan.validate_tokens), self.tokenizer, self.spec)
        return Supply(feed, validation)

    def calibration(self, rows: int, batch: int) -> Iterator[Mapping[str, Tensor]]:
        """Yields batches of line pairs, on which calibration measures the ranges of int8 inputs.

        All sources of a batch have the same length, and so do all targets of a batch. The batches therefore contain no
        padding, which would affect the measured ranges. Sources keep their padding only if the model attends to
        padding.

        Args:
            rows: the number of line pairs. The pairs are spread over the training data.
            batch: the largest number of line pairs per batch.
        """
        count = min(rows, len(self.train))
        sample = self.train[np.arange(count) * len(self.train) // count]
        sources, targets = lengths(sample.source), lengths(sample.target)
        if self.spec.model.reads_pads:
            sources[:] = sample.source.shape[1]
        for source, target in np.unique(np.stack((sources, targets), 1), axis=0):
            (alike,) = np.nonzero((sources == source) & (targets == target))
            for start in range(0, len(alike), batch):
                part = sample[alike[start : start + batch]]
                sides = {"source": part.source[:, :source], "target": part.target[:, :target]}
                yield {name: torch.from_numpy(side.astype(np.int64)) for name, side in sides.items()}
