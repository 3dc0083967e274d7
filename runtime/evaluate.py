"""Scores a run or an artifact: text in bits per byte, lines by exact match."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specc.compiler.data.polynomial import PolynomialData
from specc.compiler.train_spec import BitsSpec, ExactMatchSpec
from specc.runtime.data import BitsPerByte, DataError, evaluate_bits, open_stream
from specc.runtime.data.corpus import is_val
from specc.runtime.data.pairs import Pairs
from specc.runtime.data.polynomial import parse
from specc.runtime.data.polynomial_sets import SPLITS, Overlap, held_out, overlap, read_lines, training_set
from specc.runtime.errors import RunFailure, RuntimeFailure
from specc.runtime.exact import ExactMatch, exact_match
from specc.runtime.opened import Opened, Say, open_model, token_cache
from specc.runtime.translate import translator


class EvaluateError(RuntimeFailure):
    """What was asked for cannot be scored: no data named, a stride that no window has."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class EvaluateOptions:
    """How to score; what is None is taken from the spec, the run, or the machine.

    Attributes:
        data: of text, a source as `specc.runtime.data.open_stream` takes it; of lines, a file of them, `polynomial`
            for every held-out split, or `polynomial:NAME` for one. None for what the run was trained on.
        stride: tokens from one window to the next, 1 to the context.
        batch: windows, or lines, at once.
        max_tokens: only so many tokens from the start of the split; of lines, of their targets.
        cache: where tokenized text is kept.
        compiled: use torch.compile on a GPU.
    """

    data: str | None = None
    stride: int | None = None
    batch: int | None = None
    max_tokens: int | None = None
    cache: Path | None = None
    compiled: bool = True


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
) -> "BitsPerByte | ExactMatches":
    """The score of a run (with `quantized`, of its quantized model) or an artifact, by the metric of its spec.

    `progress` is called with tokens or lines scored and those in all. Raises as `open_model`, `evaluate_opened` and
    `evaluate_lines` do.
    """
    opened = open_model(path, target, device, quantized=quantized, search=search, say=say)
    return METRICS[opened.spec.eval.metric](opened, options, progress)


def evaluate_opened(
    opened: Opened, options: EvaluateOptions, progress: Callable[[int, int], None] | None = None
) -> BitsPerByte:
    """Bits per byte of an opened model of text. `audit()` of it says whether the two ways to count bytes agree.

    Raises EvaluateError (2) for options that fit no model, RunFailure (4) when the loss is not finite or
    memory is full, DataError for the data.
    """
    window, how = opened.spec.model.window, opened.spec.eval
    if not isinstance(how, BitsSpec):
        raise EvaluateError(f"{opened.path} is scored by {how.metric}, not in bits per byte", "see `eval:` in its spec")
    data = options.data or opened.data
    if data is None:
        raise EvaluateError(f"{opened.path} does not say what to score", "name it with --data PATH")
    stride = options.stride or how.stride
    if stride is not None and not 1 <= stride <= window:
        raise EvaluateError(f"the stride {stride} is not in 1 .. {window}, the context", "give another one")
    if options.max_tokens is not None and options.max_tokens < 1:
        raise EvaluateError(f"cannot score {options.max_tokens} tokens", "give a positive --max-tokens")
    score = opened.generated.score
    if options.compiled and opened.device.type == "cuda":
        score = torch.compile(score, fullgraph=True)
    stream = open_stream(data, "val", opened.tokenizer, options.cache or token_cache())
    try:
        result = evaluate_bits(
            score,
            stream,
            opened.tokenizer,
            window,
            options.batch or how.batch,
            opened.device,
            stride,
            options.max_tokens,
            progress,
        )
    except torch.OutOfMemoryError as error:
        raise RunFailure("out of GPU memory", "lower --batch, or eval.batch in the spec") from error
    finally:
        stream.close()
    if not math.isfinite(result.nats):
        raise RunFailure(f"the loss is {result.nats}", "the model is broken: evaluate an earlier checkpoint")
    return result


@dataclass(frozen=True, slots=True)
class SetScore:
    """The score of one set of lines. `seen` says how much of it is in the fixed training set; None where a line is no
    product of the task, or the run drew fresh samples."""

    name: str
    score: ExactMatch
    seen: Overlap | None


@dataclass(frozen=True, slots=True)
class ExactMatches:
    """The scores of one set of lines, or of every held-out split."""

    sets: tuple[SetScore, ...]

    def report(self) -> list[str]:
        """A line a set."""
        return [f"{one.name}: {one.score.line()}{f'; {one.seen}' if one.seen else ''}" for one in self.sets]

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
    opened: Opened, options: EvaluateOptions, progress: Callable[[int, int], None] | None = None
) -> ExactMatches:
    """The exact match of an opened model of pairs of lines.

    Raises EvaluateError (2) for options that fit no model, RunFailure (4) when the loss is not finite or memory is
    full, DataError for the data.
    """
    how, tokenizer = opened.spec.eval, opened.characters
    if not isinstance(how, ExactMatchSpec):
        raise EvaluateError(f"{opened.path} is scored by {how.metric}, not by exact match", "see `eval:` in its spec")
    if options.stride is not None:
        raise EvaluateError("lines are scored one by one, and have no stride", "leave --stride out")
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
            one = exact_match(score, decoder, pairs, tokenizer, batch, opened.device, progress)
        except torch.OutOfMemoryError as error:
            raise RunFailure("out of GPU memory", "lower --batch, or eval.batch in the spec") from error
        if not math.isfinite(one.nats):
            raise RunFailure(f"the loss is {one.nats}", "the model is broken: evaluate an earlier checkpoint")
        found.append(SetScore(name, one, seen))
    return ExactMatches(tuple(found))


def _sets(
    opened: Opened, data: str, how: ExactMatchSpec, max_tokens: int | None
) -> Iterator[tuple[str, Pairs, Overlap | None]]:
    """What `data` names: (name, pairs to score, how many of them were trained on)."""
    kind, tokenizer, width = opened.spec.train.data, opened.characters, opened.spec.model.window
    assert isinstance(kind, PolynomialData)  # the one kind of data that models of pairs take
    training = training_set(kind.seed, kind.lines)
    fixed = training if opened.data in (None, kind.usual) and not kind.fresh else None
    word, _, chosen = data.partition(":")
    if word == kind.usual:
        for name in [chosen] if chosen else SPLITS:
            lines = held_out(name, kind.seed, how.lines, training)
            pairs = Pairs.of(lines, tokenizer, width).within(max_tokens)
            yield name, pairs, overlap(lines[: len(pairs)], fixed) if fixed is not None else None
        return
    left, right = read_lines(Path(data).expanduser())
    if data == opened.data:  # most of the file was trained on
        held = [(a, b) for a, b in zip(left, right, strict=True) if is_val(f"{a}={b}".encode())]
        left, right = [a for a, _ in held], [b for _, b in held]
    pairs = Pairs(tokenizer.encode_rows(left, width), tokenizer.encode_rows(right, width)).within(max_tokens)
    try:
        seen = overlap(parse(left[: len(pairs)]), fixed) if fixed is not None else None
    except DataError:  # lines of another kind
        seen = None
    yield Path(data).name, pairs, seen


Scored = BitsPerByte | ExactMatches
Metric = Callable[[Opened, EvaluateOptions, Callable[[int, int], None] | None], Scored]
METRICS: Mapping[str, Metric] = {"bits_per_byte": evaluate_opened, "exact_match": evaluate_lines}
