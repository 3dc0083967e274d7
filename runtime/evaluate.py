"""Scores a run or an artifact on the validation split, in bits per byte."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specc.runtime.data import BitsPerByte, evaluate_bits, open_stream
from specc.runtime.errors import RunFailure, RuntimeFailure
from specc.runtime.opened import Opened, Say, open_model, token_cache


class EvaluateError(RuntimeFailure):
    """What was asked for cannot be scored: no data named, a stride that no window has."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class EvaluateOptions:
    """How to score; what is None is taken from the spec, the run, or the machine.

    Attributes:
        data: a source as `specc.runtime.data.open_stream` takes it; None for what the run was trained on.
        stride: tokens from one window to the next, 1 to the context.
        batch: windows at once.
        max_tokens: only so many tokens from the start of the split.
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
) -> BitsPerByte:
    """Bits per byte of a run (with `quantized`, of its quantized model) or an artifact.

    `audit()` of the result says whether the two ways to count bytes agree. `progress` is called with tokens
    scored and tokens in all. Raises as `open_model` and `evaluate_opened` do.
    """
    opened = open_model(path, target, device, quantized=quantized, search=search, say=say)
    return evaluate_opened(opened, options, progress)


def evaluate_opened(
    opened: Opened, options: EvaluateOptions, progress: Callable[[int, int], None] | None = None
) -> BitsPerByte:
    """Bits per byte of an opened model.

    Raises EvaluateError (2) for options that fit no model, RunFailure (4) when the loss is not finite or
    memory is full, DataError for the data.
    """
    spec, window = opened.spec, opened.spec.model.window
    data = options.data or opened.data
    if data is None:
        raise EvaluateError(f"{opened.path} does not say what to score", "name it with --data PATH")
    stride = options.stride or spec.eval.stride
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
            options.batch or spec.eval.batch,
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
