"""Scores a model that maps lines to lines by exact match.

The lines are held-out lines of the task in the spec, or come from a file.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specc.compiler.spec.data.lines import file_settings
from specc.compiler.spec.train import ExactMatchSpec
from specc.runtime.data.errors import DataError
from specc.runtime.data.lines.line_file import LineFile
from specc.runtime.data.lines.pairs import Pairs
from specc.runtime.data.lines.task import LineSet, Overlap, Task, task_of
from specc.runtime.decode.lines import translator
from specc.runtime.distributed.world import World
from specc.runtime.errors import RunFailure
from specc.runtime.eval.options import EvaluateError, EvaluateOptions, memory
from specc.runtime.metrics.exact_match import ExactMatch, exact_match
from specc.runtime.open_model import OpenedModel


@dataclass(frozen=True, slots=True)
class SetScore:
    """The score of one set of lines.

    Attributes:
        name: the name of the held-out split or of the file.
        digest: the SHA-256 (hex) of the lines.
        score: the score of the lines that were decoded.
        overlap: the overlap of the decoded lines with the fixed training set; None if unknown.
        held_out: whether the lines are the validation split of the training file.
        untried: the number of lines that were not decoded. Decoding stops early if the first `EvaluateOptions.hopeless`
            lines contain no exact match.
    """

    name: str
    digest: str
    score: ExactMatch
    overlap: Overlap | None
    held_out: bool = False
    untried: int = 0

    def __str__(self) -> str:
        known = str(self.overlap) if self.overlap else "overlap with the training data unknown"
        trained = "held out of the training file" if self.held_out else known
        untried = f"; none is exact, so {self.untried:,} more were not decoded" if self.untried else ""
        return f"{self.name}: {self.score.line()}; {trained}{untried}"


@dataclass(frozen=True, slots=True)
class ExactMatches:
    """The scores of one set of lines, or of all held-out splits."""

    sets: tuple[SetScore, ...]

    @property
    def digest(self) -> str:
        """A SHA-256 (hex) of the names and the lines of all sets."""
        return hashlib.sha256(json.dumps([(entry.name, entry.digest) for entry in self.sets]).encode()).hexdigest()

    def report(self) -> list[str]:
        return [str(score) for score in self.sets]

    def measures(self) -> dict[str, float | None]:
        return {f"exact_match {entry.name}": entry.score.exact_match for entry in self.sets}

    def facts(self) -> list[dict[str, float | str | None]]:
        return [
            {
                "name": entry.name,
                **entry.score.record(),
                "seen": entry.overlap.lines if entry.overlap else None,
                "seen_structures": entry.overlap.structures if entry.overlap else None,
                "held_out": entry.held_out,
            }
            for entry in self.sets
        ]


def evaluate_lines(
    opened: OpenedModel,
    options: EvaluateOptions,
    progress: Callable[[int, int], None] | None = None,
    world: World | None = None,
) -> ExactMatches:
    """Computes the fraction of exact matches of an opened model that maps lines to lines.

    Args:
        opened: the model.
        options: the data and the settings.
        progress: is called with the number of lines that are scored so far, and the total number of lines.
        world: must be None or a single process.

    Returns:
        One score per set of lines.

    Raises:
        EvaluateError: the options do not apply to the model, or the metric of the spec is not exact match.
        RunFailure: the loss is not finite, or the GPU has too little memory.
        DataError: the data cannot be read.
    """
    how, tokenizer = opened.spec.eval, opened.characters
    if not isinstance(how, ExactMatchSpec):
        raise EvaluateError(f"{opened.path} is scored by {how.metric}, not by exact match", "see `eval:` in the spec")
    if options.stride is not None or options.window is not None:
        option = "stride" if options.stride is not None else "window"
        raise EvaluateError(f"--{option} does not apply to a model that maps lines to lines", f"leave --{option} out")
    if world is not None and world.size > 1:
        raise EvaluateError("lines are scored by one process", "leave --gpus out")
    compiled = options.compiled and opened.device.type == "cuda"
    batch = options.batch or how.batch
    decoder = translator(
        opened.model, opened.spec, tokenizer, opened.device, batch=batch, beam=how.beam or 1, compiled=compiled
    )
    score = opened.line_model.score
    if compiled:
        score = torch.compile(score, fullgraph=getattr(opened.model, "fullgraph", True))
    scores = []
    for lines in _sets(opened, options, how):
        pairs = lines.pairs
        with memory():
            match = exact_match(score, decoder, pairs, tokenizer, batch, opened.device, progress, options.hopeless)
        if not math.isfinite(match.nats):
            raise RunFailure(f"the loss is {match.nats}", "the model is broken: evaluate an earlier checkpoint")
        overlap, untried = lines.overlap(match.lines), len(pairs) - match.lines
        scores.append(SetScore(lines.name, pairs.digest, match, overlap, lines.held_out, untried))
    return ExactMatches(tuple(scores))


@dataclass(frozen=True, slots=True)
class _Lines:
    """A set of lines to score. `overlap(count)` returns the overlap of the first `count` lines with the training set.
    The result is None if the overlap is unknown.
    """

    name: str
    pairs: Pairs
    overlap: Callable[[int], Overlap | None] = lambda count: None
    held_out: bool = False


def _sets(opened: OpenedModel, options: EvaluateOptions, how: ExactMatchSpec) -> Iterator[_Lines]:
    tokenizer, width = opened.characters, opened.spec.model.window
    task = task_of(opened.spec.train.data)
    trained = task is not None and _trained_on(opened, task)
    data = options.data or opened.data
    if data is None:
        if task is None or not (trained or opened.trained_on is None):
            raise EvaluateError(f"{opened.path} was trained on a file of lines", "name the file with --data")
        data = task.name
    known = task if trained and task is not None and not task.fresh else None

    def overlap(lines: LineSet, count: int) -> Overlap | None:
        return known.overlap(lines[:count]) if known else None

    name, _, split = data.partition(":")
    if task is not None and name == task.name:
        for chosen in [split] if split else task.splits:
            lines = task.held_out(chosen, how.lines)
            pairs = Pairs.of(lines, tokenizer, width).within(options.max_tokens)
            yield _Lines(chosen, pairs, partial(overlap, lines))
        return
    file = LineFile.read(data, file_settings(opened.spec.train.data), tokenizer, width)
    if _is_training_file(opened, file):
        yield _Lines(file.path.name, file.val.within(options.max_tokens), held_out=True)
        return
    if not options.data and opened.trained_on is not None:
        message = f"{file.path} is not the file with which {opened.path} was trained, or has changed since"
        raise EvaluateError(message, "restore the file, or score its lines with --data")
    pairs = file.pairs.within(options.max_tokens)
    if known is None:
        yield _Lines(file.path.name, pairs)
        return
    try:
        yield _Lines(file.path.name, pairs, partial(overlap, known.parse(file.sources[: len(pairs)])))
    except DataError:  # the lines do not belong to this task
        yield _Lines(file.path.name, pairs)


def _trained_on(opened: OpenedModel, task: Task[Any]) -> bool:
    if opened.trained_on is None:  # the artifact is of an older version without digests; a run states its data
        return opened.data == task.name
    digest: str = task.training.digest
    return opened.trained_on.train == digest


def _is_training_file(opened: OpenedModel, file: LineFile) -> bool:
    if opened.trained_on is not None:
        return opened.trained_on == file.digests
    try:
        return opened.data is not None and file.path.samefile(Path(opened.data).expanduser())
    except OSError:
        return False
