"""Measures the training table of a model that maps lines to lines.

The table has rows for training on one GPU and on several GPUs, and for decoding with and without a cache.

A rate in the table is total work divided by total time. The terms of the table are:

- A training step is one update on `train.batch` samples, which all processes share. On a GPU, the step is compiled and
  captured as a CUDA graph.
- A validation step greedily decodes `train.batch` held-out lines, from source text to target text. It compares the
  result with the target lines. The ratio of validation steps to training steps is the ratio of `eval.lines` to the
  number of lines of an epoch.
- The column `tokens` counts the tokens of sources and targets, including stop tokens, without padding.
- `overall` is the work of all training and validation steps, divided by their total seconds.
- `compile` is the number of seconds before the clock starts. This time includes compilation, graph capture, and one
  decoding of the validation lines.
- With a cache, the decoder stores the keys, values and states of previous tokens. Without a cache, the decoder
  processes all previous tokens again for each new token. In both cases, the encoder runs once per line.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from specc.runtime.bench.environment import Setup
from specc.runtime.bench.rerun import uncached_translator
from specc.runtime.bench.step import cold_caches, release
from specc.runtime.bench.timing import wait
from specc.runtime.data.lines.pairs import lengths
from specc.runtime.data.tokenizers.from_spec import characters_of
from specc.runtime.decode.lines import Translator, translator
from specc.runtime.distributed.world import World
from specc.runtime.errors import RunFailure
from specc.runtime.model.load import Loaded, initialize, instantiate
from specc.runtime.train.sources.micro_batches import micro_batches
from specc.runtime.train.sources.source import Epoch, Supply, source_of
from specc.runtime.train.trainer import TrainableModel, Trainer

BASELINE, SEVERAL, CACHE, BOTH = "baseline", "several GPUs", "KV cache", "several + cache"
NAMES = ((BASELINE, SEVERAL), (CACHE, BOTH))  # the names of the rows, indexed by [has a cache][has several processes]


@dataclass(frozen=True, slots=True)
class Totals:
    """The number of steps, samples and tokens that were processed, and the time in seconds."""

    steps: int
    samples: int
    tokens: int
    seconds: float

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class TableRow:
    """The measurement of one configuration.

    Attributes:
        name: the name of the configuration.
        gpus: the number of processes, one per GPU.
        cache: whether the decoder has a cache.
        train: the totals of the training steps.
        validation: the totals of the validation steps.
        compile_seconds: the seconds before the measurement started, which include compilation.
        exact: the number of validation lines whose prediction equals the target, with the weights after the training
            steps.
    """

    name: str
    gpus: int
    cache: bool
    train: Totals
    validation: Totals
    compile_seconds: float
    exact: int

    @property
    def overall(self) -> Totals:
        return self.train + self.validation

    @property
    def exact_match(self) -> float:
        return self.exact / self.validation.samples


@dataclass(frozen=True, slots=True)
class Table:
    """The measured rows of the training table. `missing` has the reason for each row that was not measured, by row
    name.
    """

    rows: tuple[TableRow, ...]
    missing: dict[str, str]

    @property
    def cached_over_uncached(self) -> float | None:
        """The validation time without a cache, divided by the validation time with a cache, on one GPU. None if either
        time was not measured.
        """
        seconds = {row.name: row.validation.seconds / row.validation.samples for row in self.rows}
        return seconds[BASELINE] / seconds[CACHE] if {BASELINE, CACHE} <= seconds.keys() else None


def validation_steps(steps: int, rows: int, epoch: Epoch) -> int:
    """Returns the number of validation steps to measure for `steps` training steps. Each validation step decodes `rows`
    lines.

    The ratio of validation steps to training steps is the ratio of held-out lines to samples per epoch. Raises
    RunFailure if the epoch has fewer than `rows` held-out lines.
    """
    lines = len(epoch.held_out)
    if lines < rows:
        message = f"a validation step has {rows:,} lines, but only {lines:,} are held out"
        raise RunFailure(message, f"set eval.lines to at least {rows}")
    return max(1, min(round(steps * lines / epoch.samples), lines // rows))


def measure(setup: Setup, steps: int, world: World) -> Table:
    """Measures all rows of the training table that the processes of `world` can run. Rank 0 first measures the rows for
    one process. All other ranks wait in the meantime.

    Args:
        setup: the setup of the benchmark. Its spec must have the architecture `encoder_decoder`.
        steps: the number of training steps.
        world: the processes that take part in the benchmark.

    Returns:
        The measured rows, and the reason for each row that was not measured.

    Raises:
        BatchError: if a batch cannot be divided evenly among the processes.
        RunFailure: if there are fewer held-out lines than a batch needs, a loss is not finite, or a decoder is broken.
    """
    micro_batches(setup.spec.train, setup.spec.model.window, world.size)  # raises early if a batch cannot be divided
    rows: list[TableRow] = []
    if world.rank == 0:
        rows += _rows(setup, steps, World.alone().on(world.device))
    missing = {}
    world.wait()
    if world.size > 1:
        rows += _rows(setup, steps, world)
    else:
        missing = dict.fromkeys((SEVERAL, BOTH), _why_alone(world.device))
    order = (BASELINE, SEVERAL, CACHE, BOTH)
    return Table(tuple(sorted(rows, key=lambda row: order.index(row.name))), missing)


def _why_alone(device: torch.device) -> str:
    if device.type != "cuda":
        return "one process ran on the CPU: --gpus 2 measures two"
    count = torch.cuda.device_count()
    return f"one process ran: --gpus {count} measures it" if count > 1 else "this machine has only one GPU"


def _rows(setup: Setup, steps: int, world: World) -> Iterator[TableRow]:
    spec, say = setup.spec, setup.say
    processes = f"{world.size} process{'es' if world.size > 1 else ''}"
    say(f"table, {processes}: compiles, then trains {steps} steps")
    torch.compiler.reset()
    with ExitStack() as stack:
        stack.enter_context(cold_caches(world.device))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specc-bench-")))
        began = time.perf_counter()
        torch.manual_seed(spec.train.seed)
        loaded = instantiate(spec, setup.target, folder / "model", lock=setup.lock)
        initialize(loaded, spec.train.seed)
        rendered = time.perf_counter() - began
        opened = source_of(spec)(spec, ()).open(spec.train.data.usual, folder, stack)
        assert opened.epoch is not None
        rows = spec.train.rows(spec.model.window)
        scored = _Scored.of(opened.epoch, loaded, steps, rows, world)
        supply = opened.supply(loaded, world, stack)
        began = time.perf_counter()
        trainer = _warm(loaded, supply, world)
        (warming,) = world.most(time.perf_counter() - began)
        train = _train(trainer, supply, steps)
        say(f"  {train.steps_per_second:.4g} steps/s, {train.samples_per_second:,.0f} samples/s")
        batch, device, gpu = rows // world.size, world.device, world.device.type == "cuda"
        for cache in (False, True):
            began = time.perf_counter()
            if cache:
                decoder = translator(loaded.model, spec, characters_of(spec), device, batch=batch, compiled=gpu)
            else:
                decoder = uncached_translator(loaded, folder / "rerun", device, batch)
            building = time.perf_counter() - began
            first, _ = scored.time(decoder)
            validation, exact = scored.time(decoder)
            compiling = rendered + warming + building + max(0.0, first.seconds - validation.seconds)
            row = TableRow(NAMES[cache][world.size > 1], world.size, cache, train, validation, compiling, exact)
            say(f"  {row.name}: {validation.samples_per_second:,.0f} lines/s decoded")
            yield row
            del decoder
    del trainer, supply
    release(world.device)


def _warm(loaded: Loaded, supply: Supply, world: World) -> Trainer:
    window, programs = loaded.spec.model.window, loaded.programs
    model = TrainableModel(loaded.model, programs.params, window, "bench", derived=programs.derived_weights)
    trainer = Trainer(model, loaded.spec.train, supply.feed, world, world.device.type == "cuda")
    trainer.warm_up(supply.validation.vocabulary)
    wait(world.device)
    return trainer


def _train(trainer: Trainer, supply: Supply, steps: int) -> Totals:
    samples, tokens = supply.feed.counted()
    wait(trainer.device)
    trainer.world.wait()
    began = time.perf_counter()
    for _ in range(steps):
        trainer.advance()
    trainer.settle()
    (seconds,) = trainer.world.most(time.perf_counter() - began)
    all_samples, all_tokens = supply.feed.counted()
    return Totals(steps, (all_samples or 0) - (samples or 0), all_tokens - tokens, seconds)


@dataclass(frozen=True, slots=True)
class _Scored:
    """The validation lines that this process decodes, and the totals over all processes."""

    sources: list[str]
    targets: list[str]
    totals: Totals
    world: World

    @classmethod
    def of(cls, epoch: Epoch, loaded: Loaded, training_steps: int, rows: int, world: World) -> "_Scored":
        steps = validation_steps(training_steps, rows, epoch)
        lines = epoch.held_out[: steps * rows]
        local = lines[world.rank :: world.size]
        tokens = int(lengths(lines.source).sum() + lengths(lines.target).sum())
        sources, targets = (characters_of(loaded.spec).decode_rows(side) for side in (local.source, local.target))
        return cls(sources, targets, Totals(steps, len(lines), tokens, 0.0), world)

    def time(self, decoder: Translator) -> tuple[Totals, int]:
        """Decodes the validation lines of this process. Returns the totals and the number of exact matches, both over
        all processes. The time in the totals is the time of the slowest process.
        """
        each = len(self.sources) // self.totals.steps
        self.world.wait()
        began, exact = time.perf_counter(), 0
        for start in range(0, each * self.totals.steps, each):
            texts = decoder.translate(self.sources[start : start + each])
            exact += sum(a == b for a, b in zip(texts, self.targets[start : start + each], strict=True))
        (seconds,) = self.world.most(time.perf_counter() - began)
        (matches,) = self.world.totals(np.array([float(exact)]))
        return replace(self.totals, seconds=seconds), int(matches)
