"""The training table of a model of pairs: one GPU or several, decoding with a cache or without.

All rates are totals over totals, never means of rates:

- A training step is one update on `train.batch` samples of all processes together, as in `specc train`: teacher
  forcing by the spec, compiled and captured on a GPU, batches transferred while the previous batch computes.
- A validation step decodes that many lines of the held-out split greedily and compares each with its target, from
  text to text. Several processes share its lines. The ratio of validation to training steps is that of `eval.lines`
  to the lines of the spec's epoch, with at least one validation step.
- tokens: of sources and targets, including stops, without pads. overall: all steps over all seconds of both.
- compile: seconds before the clock starts, in which code is rendered and compiled and graphs are captured. This
  includes a first pass over the validation lines.
- With the cache a decoder stores the keys, values and states of its previous tokens. Without it, it runs again over
  all of them for each token. The encoder runs once per line in both.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from specc.compiler.plan.lock import Lock
from specc.compiler.spec.spec import Spec
from specc.runtime.bench.rerun import Rerun, rerun_model
from specc.runtime.bench.step import cold_caches, wait
from specc.runtime.data.lines.pairs import lengths
from specc.runtime.data.tokenizers.characters import CharTokenizer
from specc.runtime.data.tokenizers.from_spec import characters_of
from specc.runtime.decode.lines import Translator, translator
from specc.runtime.distributed.world import World
from specc.runtime.errors import RunFailure
from specc.runtime.model.load import Loaded, initialize, instantiate
from specc.runtime.train.sources.micro_batches import micro_batches
from specc.runtime.train.sources.source import Epoch, Supply, source_of
from specc.runtime.train.trainable_model import TrainableModel
from specc.runtime.train.trainer import Trainer

BASELINE, SEVERAL, CACHE, BOTH = "baseline", "several GPUs", "KV cache", "several + cache"
NAMES = ((BASELINE, SEVERAL), (CACHE, BOTH))  # indexed by [has a cache][has several processes]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Totals:
    """An amount of work and its time in seconds."""

    steps: int
    samples: int
    tokens: int
    seconds: float

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(
            self.steps + other.steps,
            self.samples + other.samples,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
        )

    @property
    def rates(self) -> tuple[float, float, float]:
        """Steps, samples and tokens per second."""
        return self.steps / self.seconds, self.samples / self.seconds, self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class TableRow:
    """The measurement of one configuration. `compiling` is the seconds before the clocks started. `exact` is the number
    of validation lines that equal their target, with the weights at the end of these steps."""

    name: str
    gpus: int
    cache: bool
    train: Totals
    validation: Totals
    compiling: float
    exact: int

    @property
    def overall(self) -> Totals:
        return self.train + self.validation


@dataclass(frozen=True, slots=True)
class Table:
    """The measured rows, and, by name, why the others were not measured."""

    rows: tuple[TableRow, ...]
    missing: dict[str, str]

    @property
    def cached_gain(self) -> float | None:
        """The time of validation without a cache as a multiple of the time with a cache, on one GPU. None if either is
        missing."""
        seconds = {row.name: row.validation.seconds / row.validation.samples for row in self.rows}
        return seconds[BASELINE] / seconds[CACHE] if {BASELINE, CACHE} <= seconds.keys() else None


def validation_steps(steps: int, rows: int, epoch: Epoch) -> int:
    """Returns the number of validation steps for a number of training steps, in the proportion of held-out lines to
    samples per epoch.

    Each step has `rows` lines. Raises RunFailure if there are fewer than `rows` held-out lines.
    """
    lines = len(epoch.held_out)
    if lines < rows:
        message = f"a validation step has {rows:,} lines, and {lines:,} are held out"
        raise RunFailure(message, f"set eval.lines to at least {rows}")
    return max(1, min(round(steps * lines / epoch.samples), lines // rows))


def measure(spec: Spec, target: str, lock: Lock, steps: int, world: World, say: Say) -> Table:
    """Measures all rows that the processes of `world` can run. Rank 0 first measures the rows of one process, while the
    others wait.

    Args:
        spec: the spec of a model of pairs.
        target: the target to run.
        lock: the measured kernels.
        steps: the number of training steps.
        world: the processes.
        say: reports progress.

    Returns:
        The table.

    Raises:
        BatchError: if a batch cannot be divided evenly.
        RunFailure: if there are fewer held-out lines than a batch, a loss is not finite, or a decoder is broken.
    """
    micro_batches(spec.train, spec.model.window, world.size)  # before anything is measured
    rows: list[TableRow] = []
    if world.rank == 0:
        rows += _rows(spec, target, lock, steps, World.alone().on(world.device), say)
    missing = {}
    world.wait()
    if world.size > 1:
        rows += _rows(spec, target, lock, steps, world, say)
    else:
        reason = _why_alone(world.device)
        missing = {names[1]: reason for names in NAMES}
    order = {name: i for i, name in enumerate((BASELINE, SEVERAL, CACHE, BOTH))}
    return Table(tuple(sorted(rows, key=lambda row: order[row.name])), missing)


def _why_alone(device: torch.device) -> str:
    """Returns the reason why there are no rows of several processes."""
    if device.type != "cuda":
        return "the target is the CPU, and one process ran: --gpus 2 measures two on the CPU"
    count = torch.cuda.device_count()
    return f"one process ran: --gpus {count} measures it" if count > 1 else "it needs more GPUs than this machine's one"


def _rows(spec: Spec, target: str, lock: Lock, steps: int, world: World, say: Say) -> Iterator[TableRow]:
    """Yields the two rows of one number of processes. Both share one training measurement, because training does not
    depend on the cache."""
    processes = f"{world.size} process{'es' if world.size > 1 else ''}"
    say(f"table, {processes}: compiles, then trains {steps} steps")
    torch.compiler.reset()
    with ExitStack() as stack:
        stack.enter_context(cold_caches(world.device))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specc-bench-")))
        began = time.perf_counter()
        torch.manual_seed(spec.train.seed)
        loaded = instantiate(spec, target, folder / "model", lock=lock)
        initialize(loaded, spec.train.seed)
        rendered = time.perf_counter() - began
        opened = source_of(spec).ready(spec, ()).open(spec.train.data.usual, folder, stack)
        epoch = opened.epoch
        assert epoch is not None
        tokenizer = characters_of(spec)
        scored = _Scored.of(epoch, tokenizer, steps, spec.train.rows(spec.model.window), world)
        supply = opened.supply(loaded, world, stack)
        trainer, warming = _warm(loaded, supply, world)
        train = _train(trainer, supply, steps)
        say(f"  {train.rates[0]:.4g} steps/s, {train.rates[1]:,.0f} samples/s")
        for cache in (False, True):
            before = time.perf_counter()
            decoder = _decoder(loaded, tokenizer, world, folder / "rerun", cache)
            made = time.perf_counter() - before
            first, _ = scored.time(decoder)
            validation, exact = scored.time(decoder)
            compiling = rendered + warming + made + max(0.0, first.seconds - validation.seconds)
            row = TableRow(NAMES[cache][world.size > 1], world.size, cache, train, validation, compiling, exact)
            say(f"  {row.name}: {validation.rates[1]:,.0f} lines/s decoded")
            yield row
            del decoder
    del trainer, supply
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def _warm(loaded: Loaded, supply: Supply, world: World) -> tuple[Trainer, float]:
    """Returns a compiled trainer, and the seconds that compilation took."""
    began, train, gpu = time.perf_counter(), loaded.spec.train, world.device.type == "cuda"
    window, params = loaded.spec.model.window, loaded.programs.params
    trainer = Trainer(TrainableModel(loaded.model, params, window, "bench"), train, supply.training, world, gpu)
    trainer.warm_up(supply.validation.vocabulary)
    wait(trainer)
    return trainer, world.most(time.perf_counter() - began)[0]


def _train(trainer: Trainer, supply: Supply, steps: int) -> Totals:
    samples, tokens = supply.training.feed.counted()
    wait(trainer)
    trainer.world.wait()
    began = time.perf_counter()
    for _ in range(steps):
        trainer.advance()
    trainer.settle()
    (seconds,) = trainer.world.most(time.perf_counter() - began)
    more, written = supply.training.feed.counted()
    return Totals(steps, (more or 0) - (samples or 0), written - tokens, seconds)


def _decoder(loaded: Loaded, tokenizer: CharTokenizer, world: World, folder: Path, cache: bool) -> Translator:
    spec, gpu = loaded.spec, world.device.type == "cuda"
    batch = spec.train.rows(spec.model.window) // world.size
    if cache:
        return translator(loaded.model, spec, tokenizer, world.device, batch=batch, compiled=gpu)
    window = spec.model.window
    steps = Rerun(rerun_model(loaded, folder), window, gpu)
    return Translator(steps, tokenizer, window, spec.model.reads_pads, world.device, batch)


@dataclass(frozen=True, slots=True)
class _Scored:
    """This process's part of the validation lines, and the totals over all processes."""

    sources: list[str]
    targets: list[str]
    steps: int
    samples: int
    tokens: int
    world: World

    @classmethod
    def of(cls, epoch: Epoch, tokenizer: CharTokenizer, training_steps: int, rows: int, world: World) -> "_Scored":
        steps = validation_steps(training_steps, rows, epoch)
        every = epoch.held_out[: steps * rows]
        mine = every[world.rank :: world.size]
        tokens = int(lengths(every.source).sum() + lengths(every.target).sum())
        sources, targets = (tokenizer.decode_rows(side) for side in (mine.source, mine.target))
        return cls(sources, targets, steps, len(every), tokens, world)

    def time(self, decoder: Translator) -> tuple[Totals, int]:
        """Decodes the lines, one step at a time, and counts the exact matches. The seconds are those of the slowest
        process."""
        each = len(self.sources) // self.steps
        self.world.wait()
        began, exact = time.perf_counter(), 0
        for start in range(0, each * self.steps, each):
            texts = decoder.translate(self.sources[start : start + each])
            exact += sum(a == b for a, b in zip(texts, self.targets[start : start + each], strict=True))
        (seconds,) = self.world.most(time.perf_counter() - began)
        (right,) = self.world.totals(torch.tensor([float(exact)], dtype=torch.float64).numpy())
        return Totals(self.steps, self.samples, self.tokens, seconds), int(right)
