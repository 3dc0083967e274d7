"""Pairs of lines, generated or from a file, scored by exact match."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specc.compiler.spec.data.polynomial import PolynomialData
from specc.compiler.spec.spec import Spec
from specc.compiler.spec.train import ExactMatchSpec
from specc.runtime.data.documents.corpus import is_val
from specc.runtime.data.errors import DataError
from specc.runtime.data.lines.pairs import FixedSet, FreshSamples, PairLoader, Pairs, lengths
from specc.runtime.data.lines.polynomial_sets import Fresh, held_out, training_set
from specc.runtime.data.tokenizers.characters import CharTokenizer
from specc.runtime.data.windows.opening import characters_of
from specc.runtime.distributed.world import World
from specc.runtime.metrics.exact_match import PairValidation
from specc.runtime.model.load import Loaded, device_of
from specc.runtime.train.sources.feed import Forced, TrainingData
from specc.runtime.train.sources.micro_batches import micro_batches
from specc.runtime.train.sources.source import Epoch, Source, Supply


@dataclass(frozen=True, slots=True)
class _Lines:
    spec: Spec
    tokenizer: CharTokenizer
    files: Sequence[Path] = ()  # its lines are generated, or in the file that `--data` names

    def open(self, data: str, cache: Path, stack: ExitStack) -> _Sets:
        """`polynomial` generates lines; else `data` is a file of them, of which one in ten, by SHA-256, validates."""
        kind, width = self.spec.train.data, self.spec.model.window
        assert isinstance(kind, PolynomialData) and isinstance(self.spec.eval, ExactMatchSpec)
        if data == kind.kind:
            lines = training_set(kind.seed, kind.lines)
            scored = held_out("same-law", kind.seed, self.spec.eval.lines, lines)
            train, val = (Pairs.of(some, self.tokenizer, width) for some in (lines, scored))
            return _Sets(self.spec, self.tokenizer, train, val, Fresh(kind.seed, kind.lines) if kind.fresh else None)
        if kind.fresh:
            raise DataError("`fresh: true` draws samples, and a file has none to draw", "train without --data")
        pairs, left, right = Pairs.read(Path(data).expanduser(), self.tokenizer, width)
        held = np.array([is_val(f"{a}={b}".encode()) for a, b in zip(left, right, strict=True)])
        if held.all() or not held.any():
            raise DataError(f"{data}: too few lines to hold some out", "one line in ten, by hash, validates: give more")
        train, val = pairs[np.flatnonzero(~held)], pairs[np.flatnonzero(held)]
        return _Sets(self.spec, self.tokenizer, train, val, None)


@dataclass(frozen=True, slots=True)
class _Sets:
    spec: Spec
    tokenizer: CharTokenizer
    train: Pairs
    val: Pairs
    fresh: Fresh | None

    @property
    def digests(self) -> Sequence[str]:
        return [self.train.digest, self.val.digest]

    @property
    def epoch(self) -> Epoch | None:
        return Epoch(len(self.train), self.val)

    def supply(self, loaded: Loaded, world: World, stack: ExitStack) -> Supply:
        plan, window, match = self.spec.train, self.spec.model.window, self.spec.eval
        assert isinstance(match, ExactMatchSpec)
        samples = (
            FixedSet(self.train, plan.seed, world.device)
            if self.fresh is None
            else FreshSamples(self.fresh, self.tokenizer, window)
        )
        rows, passes = plan.at_once(world.size), micro_batches(plan, window, world.size)
        loader = stack.enter_context(PairLoader(samples, rows, passes, world.device, world.rank, world.size))
        feed = Forced(loaded.model, plan.forcing, len(self.train), plan.seed, loader)
        validation = PairValidation(self.val.within(plan.validate_tokens), self.tokenizer, self.spec)
        return Supply(TrainingData(loader, feed), validation)

    def calibration(self, rows: int, batch: int) -> Iterator[Mapping[str, Tensor]]:
        """Lines of equal lengths together, without pads: a decoder that is done reads none, and no range is theirs.
        Sources keep theirs where the model reads them."""
        count = min(rows, len(self.train))
        taken = self.train[np.arange(count) * len(self.train) // count]
        sources, targets = lengths(taken.source), lengths(taken.target)
        if self.spec.model.reads_pads:
            sources[:] = taken.source.shape[1]
        for source, target in np.unique(np.stack((sources, targets), 1), axis=0):
            (alike,) = np.nonzero((sources == source) & (targets == target))
            for start in range(0, len(alike), batch):
                part = taken[alike[start : start + batch]]
                sides = {"source": part.source[:, :source], "target": part.target[:, :target]}
                yield {name: torch.from_numpy(side.astype(np.int64)) for name, side in sides.items()}


def _drill(spec: Spec, loaded: Loaded, batches: int, stack: ExitStack) -> TrainingData:
    kind, window = spec.train.data, spec.model.window
    assert isinstance(kind, PolynomialData)
    lines = Pairs.of(training_set(kind.seed, batches * spec.train.rows(window)), characters_of(spec), window)
    sets = _Sets(spec, characters_of(spec), lines, lines, None)
    return sets.supply(loaded, World.alone().on(torch.device(device_of(loaded.target))), stack).training


def _ready(spec: Spec, search: Sequence[Path]) -> _Lines:
    return _Lines(spec, characters_of(spec))


POLYNOMIAL = Source("polynomial", _ready, _drill)
