"""Training on windows of one token stream. Validation computes bits per byte."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
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
from specc.runtime.train.sources.feed import Feed, Windows
from specc.runtime.train.sources.source import Epoch, OpenData, Source, Supply


class Text(Source):
    """Text files, jsonl files or token shards. The run directory receives a copy of the tokenizer files."""

    name = "text"

    def __init__(self, spec: Spec, search: Sequence[Path]) -> None:
        assert isinstance(spec.train.data, TextData)
        self._spec, self._tokenizer = spec, tokenizer_of(spec, search)
        self.files = tokenizer_files(spec.train.data.tokenizer, search)

    def open(self, data: str, cache: Path, stack: ExitStack) -> OpenData:
        streams = [open_stream(data, split, self._tokenizer, cache) for split in ("train", "val")]
        for stream in streams:
            stack.callback(stream.close)
        return _Streams(self._spec, self._tokenizer, *streams)

    @staticmethod
    def drill(spec: Spec, loaded: Loaded, batches: int, stack: ExitStack) -> Feed:
        train, window = spec.train, spec.model.window
        return Windows(RandomTokens(train.at_once(), window, spec.model.vocabulary, batches), train.pass_tokens(window))


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
        rows, ranks = plan.at_once(world.size), (world.rank, world.size)
        loader = Loader(
            self.train, rows, window, data.order, plan.seed, *ranks, device=world.device, bos=self.tokenizer.bos
        )
        stack.enter_context(loader)
        batch, unscored = self.spec.eval.batch, self.spec.model.unscored
        validation = Validation(self.val, self.tokenizer, batch, plan.validate_tokens, unscored)
        return Supply(Windows(loader, plan.pass_tokens(window, world.size)), validation)

    def calibration(self, rows: int, batch: int) -> Iterator[Mapping[str, Tensor]]:
        settings = Calibrate(sequences=rows, batch=batch)
        windows = calibration_windows(self.train, settings, self.spec.model.window, self.spec.train.seed)
        yield from ({"ids": ids, "targets": targets} for ids, targets in windows)


class RandomTokens:
    """Provides random batches in place of a loader of text.

    Args:
        batch, length: the shape of ids and targets, i64 [batch, length].
        vocabulary: the number of different ids.
        count: the number of different batches. After `count` batches, the batches repeat.
        seed: the seed of the random numbers.
    """

    def __init__(self, batch: int, length: int, vocabulary: int, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        batches = torch.randint(vocabulary, (count, 2, batch, length), generator=generator)
        self._batches = cycle(tuple(batch) for batch in batches)

    def next(self) -> tuple[Tensor, ...]:
        return next(self._batches)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Does nothing, because random batches have no position to restore."""
