"""Windows of one stream of tokens, scored in bits per byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.compiler.spec.data.text import TextData
from specc.compiler.spec.spec import Calibrate, Spec
from specc.compiler.spec.train import BitsSpec
from specc.runtime.calibration.calibrate import calibration_windows
from specc.runtime.data.tokenizers.from_spec import tokenizer_of
from specc.runtime.data.tokenizers.open import tokenizer_files
from specc.runtime.data.tokenizers.tokenizer import Tokenizer
from specc.runtime.data.windows.loader import Loader
from specc.runtime.data.windows.stream import TokenStream, open_stream
from specc.runtime.distributed.world import World
from specc.runtime.metrics.validation import Validation
from specc.runtime.model.load import Loaded
from specc.runtime.storage.data_digests import DataDigests
from specc.runtime.train.sources.feed import TrainingData, Windows
from specc.runtime.train.sources.source import Epoch, Source, Supply


@dataclass(frozen=True, slots=True)
class _Text:
    spec: Spec
    tokenizer: Tokenizer
    files: Sequence[Path]

    def open(self, data: str, cache: Path, stack: ExitStack) -> _Streams:
        streams = [open_stream(data, split, self.tokenizer, cache) for split in ("train", "val")]
        for stream in streams:
            stack.callback(stream.close)
        return _Streams(self.spec, self.tokenizer, *streams)


@dataclass(frozen=True, slots=True)
class _Streams:
    spec: Spec
    tokenizer: Tokenizer
    train: TokenStream
    val: TokenStream

    @property
    def digests(self) -> DataDigests:
        return DataDigests(train=self.train.digest, val=self.val.digest)

    @property
    def epoch(self) -> Epoch | None:
        return None

    def supply(self, loaded: Loaded, world: World, stack: ExitStack) -> Supply:
        plan, window, data = self.spec.train, self.spec.model.window, self.spec.train.data
        assert isinstance(data, TextData) and isinstance(self.spec.eval, BitsSpec)
        rows = plan.at_once(world.size)
        share = world.rank, world.size
        loader = Loader(self.train, rows, window, data.order, plan.seed, *share, device=world.device)
        stack.enter_context(loader)
        validation = Validation(self.val, self.tokenizer, self.spec.eval.batch, plan.validate_tokens)
        return Supply(TrainingData(loader, Windows(plan.rows(window) * window)), validation)

    def calibration(self, rows: int, batch: int) -> Iterator[Mapping[str, Tensor]]:
        wanted = Calibrate(sequences=rows, batch=batch)
        windows = calibration_windows(self.train, wanted, self.spec.model.window, self.spec.train.seed)
        yield from ({"ids": ids, "targets": targets} for ids, targets in windows)


class RandomTokens:
    """A substitute for a loader: yields batches of ids and targets, i64 [batch, length], uniform over the vocabulary.
    It cycles through `count` different batches."""

    def __init__(self, batch: int, length: int, vocabulary: int, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._batches = torch.randint(vocabulary, (count, 2, batch, length), generator=generator)
        self._given = 0

    def next(self) -> tuple[Tensor, Tensor]:
        ids, targets = self._batches[self._given % len(self._batches)]
        self._given += 1
        return ids, targets

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Does nothing: there is no state to restore."""

    def close(self) -> None:
        """Does nothing: nothing is open."""


def _drill(spec: Spec, loaded: Loaded, batches: int, stack: ExitStack) -> TrainingData:
    train, window = spec.train, spec.model.window
    tokens = RandomTokens(train.at_once(), window, spec.model.vocabulary, batches)
    return TrainingData(tokens, Windows(train.rows(window) * window))


def _ready(spec: Spec, search: Sequence[Path]) -> _Text:
    tokenizer, data = tokenizer_of(spec, search), spec.train.data
    assert isinstance(data, TextData)
    return _Text(spec, tokenizer, tokenizer_files(data.tokenizer, search))


TEXT = Source("text", _ready, _drill)
