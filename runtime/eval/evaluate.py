"""Scores a run or an artifact: text in bits per byte, lines by exact match."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from specc.compiler.build import canonical
from specc.compiler.spec.data.polynomial import PolynomialData
from specc.compiler.spec.train import ExactMatchSpec
from specc.compiler.targets import TARGETS
from specc.runtime.data.documents.corpus import is_val
from specc.runtime.data.errors import DataError
from specc.runtime.data.lines.pairs import Pairs
from specc.runtime.data.lines.polynomial import Lines, parse
from specc.runtime.data.lines.polynomial_sets import SPLITS, Overlap, held_out, overlap, training_set
from specc.runtime.decode.lines import translator
from specc.runtime.distributed.launch import own_cpu, target_of
from specc.runtime.distributed.world import World
from specc.runtime.errors import RunFailure
from specc.runtime.eval.text import Adapted, EvaluateError, EvaluateOptions, adapting, evaluate_adapted, evaluate_text
from specc.runtime.metrics.bits_per_byte import BitsPerByte
from specc.runtime.metrics.exact_match import ExactMatch, exact_match
from specc.runtime.model.load import device_of
from specc.runtime.open_model import OpenedModel, Say, open_model, spec_at

__all__ = ["METRICS", "Adapted", "EvaluateError", "EvaluateOptions", "ExactMatches", "evaluate", "evaluate_lines"]
__all__ += ["evaluate_adapted", "evaluate_text"]


def evaluate(
    path: Path,
    options: EvaluateOptions,
    *,
    target: str | None = None,
    device: str | None = None,
    quantized: bool = False,
    search: Sequence[Path] = (),
    say: Say | None = None,
    progress: Callable[[int, int], None] | None = None,
    world: World | None = None,
    gpus: int | None = None,
) -> "BitsPerByte | ExactMatches | Adapted":
    """The score of a run (with `quantized`, of its quantized model) or an artifact, by the metric of its spec; with
    `options.adapt`, what a method that adapts makes of it, which is another thing.

    `progress` is called with tokens or lines scored and those in all. Several processes share the work where all call
    it with their `world`, each on a device of its own; where a number of `gpus` was asked for, that is no CPU unless it
    is the `target`, or where it is unset what `own_cpu` gives. Raises as `open_model`, `evaluate_text`,
    `evaluate_adapted` and `evaluate_lines` do; RunFailure where the processes differ, EnvironmentFailure where there
    are fewer GPUs than processes.
    """
    if gpus is not None and world is not None and gpus != world.size:
        raise EvaluateError(f"--gpus {gpus}, but {world.size} processes were started", "leave --gpus out")
    if gpus is not None or (world is not None and world.size > 1):
        spec = spec_at(path)
        target = target_of(spec, target or own_cpu(path, spec), gpus)
        world = (world or World.alone()).on(torch.device(device or device_of(TARGETS[target])))
        device = str(world.device)
    world = world or World.alone()
    prepared = (lambda spec: spec) if options.adapt is None else partial(adapting, options=options)
    with world.in_turn("open"):  # one makes what others find: kernels that are compiled
        opened = open_model(path, target, device, quantized=quantized, search=search, say=say, prepared=prepared)
    if world.size > 1:
        sums = [float(weight.detach().double().sum()) for weight in opened.model.parameters()]
        world.require_same("model", {"spec": canonical(opened.spec), "weights": str(sums)})
    if options.adapt is not None:
        return evaluate_adapted(opened, options, progress, world)
    return METRICS[opened.spec.eval.metric](opened, options, progress, world)


@dataclass(frozen=True, slots=True)
class SetScore:
    """The score of one set of lines. `seen` says how much of it is in the fixed training set; None where a line is no
    product of the task, or the run drew fresh samples. `left` lines were not tried, as none before them was exact."""

    name: str
    score: ExactMatch
    seen: Overlap | None
    left: int = 0

    def __str__(self) -> str:
        seen = f"; {self.seen}" if self.seen else ""
        left = f"; none of them exact, so {self.left:,} more were not tried" if self.left else ""
        return f"{self.name}: {self.score.line()}{seen}{left}"


@dataclass(frozen=True, slots=True)
class ExactMatches:
    """The scores of one set of lines, or of every held-out split."""

    sets: tuple[SetScore, ...]

    def report(self) -> list[str]:
        """A line a set."""
        return [str(one) for one in self.sets]

    def facts(self) -> list[dict[str, float | str | None]]:
        """The same for programs."""
        return [
            {
                "name": one.name,
                **one.score.record(),
                "seen": one.seen.lines if one.seen else None,
                "seen_structures": one.seen.structures if one.seen else None,
            }
            for one in self.sets
        ]


def evaluate_lines(
    opened: OpenedModel,
    options: EvaluateOptions,
    progress: Callable[[int, int], None] | None = None,
    world: World | None = None,
) -> ExactMatches:
    """The exact match of an opened model of pairs of lines.

    Raises EvaluateError (2) for options that fit no model, RunFailure (4) when the loss is not finite or memory is
    full, DataError for the data.
    """
    how, tokenizer = opened.spec.eval, opened.characters
    if not isinstance(how, ExactMatchSpec):
        raise EvaluateError(f"{opened.path} is scored by {how.metric}, not by exact match", "see `eval:` in its spec")
    if options.stride is not None or options.window is not None:
        what = "stride" if options.stride is not None else "window"
        raise EvaluateError(f"lines are scored one by one, and have no {what}", f"leave --{what} out")
    if world is not None and world.size > 1:
        raise EvaluateError("lines are scored by one process", "leave --gpus out")
    if options.max_tokens is not None and options.max_tokens < 1:
        raise EvaluateError(f"cannot score {options.max_tokens} tokens", "give a positive --max-tokens")
    compiled = options.compiled and opened.device.type == "cuda"
    batch = options.batch or how.batch
    decoder = translator(
        opened.model, opened.spec, tokenizer, opened.device, batch=batch, beam=how.beam or 1, compiled=compiled
    )
    score = opened.generated.score
    if compiled:
        score = torch.compile(score, fullgraph=getattr(opened.model, "fullgraph", True))
    found = []
    source = options.data or opened.data or opened.spec.train.data.usual
    for name, pairs, seen in _sets(opened, source, how, options.max_tokens):
        try:
            one = exact_match(score, decoder, pairs, tokenizer, batch, opened.device, progress, options.hopeless)
        except torch.OutOfMemoryError as error:
            raise RunFailure("out of GPU memory", "lower --batch, or eval.batch in the spec") from error
        if not math.isfinite(one.nats):
            raise RunFailure(f"the loss is {one.nats}", "the model is broken: evaluate an earlier checkpoint")
        found.append(SetScore(name, one, seen(one.lines), len(pairs) - one.lines))
    return ExactMatches(tuple(found))


def _sets(
    opened: OpenedModel, data: str, how: ExactMatchSpec, max_tokens: int | None
) -> Iterator[tuple[str, Pairs, Callable[[int], Overlap | None]]]:
    """What `data` names: (name, pairs to score, how many of so many of them were trained on)."""
    kind, tokenizer, width = opened.spec.train.data, opened.characters, opened.spec.model.window
    assert isinstance(kind, PolynomialData)  # the one kind of data that models of pairs take
    training = training_set(kind.seed, kind.lines)
    fixed = training if opened.data in (None, kind.usual) and not kind.fresh else None
    word, _, chosen = data.partition(":")
    if word == kind.usual:
        for name in [chosen] if chosen else SPLITS:
            lines = held_out(name, kind.seed, how.lines, training)
            pairs = Pairs.of(lines, tokenizer, width).within(max_tokens)
            yield name, pairs, partial(_seen, lines, fixed)
        return
    pairs, left, right = Pairs.read(Path(data).expanduser(), tokenizer, width)
    if data == opened.data:  # most of the file was trained on
        held = [i for i, (a, b) in enumerate(zip(left, right, strict=True)) if is_val(f"{a}={b}".encode())]
        pairs, left = pairs[np.array(held)], [left[i] for i in held]
    pairs = pairs.within(max_tokens)
    try:
        seen = partial(_seen, parse(left[: len(pairs)]), fixed)
    except DataError:  # lines of another kind
        seen = partial(_seen, training, None)
    yield Path(data).name, pairs, seen


def _seen(lines: Lines, training: Lines | None, count: int) -> Overlap | None:
    """How many of the first `count` lines were trained on, where that is known."""
    return overlap(lines[:count], training) if training is not None else None


Scored = BitsPerByte | ExactMatches
Metric = Callable[[OpenedModel, EvaluateOptions, Callable[[int, int], None] | None, World | None], Scored]
METRICS: Mapping[str, Metric] = {"bits_per_byte": evaluate_text, "exact_match": evaluate_lines}
