"""Scores a text model in bits per byte, with or without test-time adaptation."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from specc.compiler.spec.adapt.adaptation import Adaptation
from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec
from specc.compiler.spec.train import BitsSpec
from specc.runtime.data.windows.evaluation import WindowPlan
from specc.runtime.data.windows.stream import TokenStream, open_stream
from specc.runtime.distributed.world import World
from specc.runtime.errors import RunFailure
from specc.runtime.eval.adapt.method import Work, method_of
from specc.runtime.eval.options import FEWER, EvaluateError, EvaluateOptions, memory, windows_of
from specc.runtime.metrics.bits_per_byte import Account, BitsPerByte, ScoredText, evaluate_bits
from specc.runtime.metrics.share import Share
from specc.runtime.open_model import OpenedModel, token_cache
from specc.runtime.storage.run_directory import readable


def evaluate_text(
    opened: OpenedModel,
    options: EvaluateOptions,
    progress: Callable[[int, int], None] | None = None,
    world: World | None = None,
) -> BitsPerByte:
    """Computes the bits per byte of an opened text model.

    If all processes have the same kind of device, the result does not depend on the number of processes.

    Args:
        opened: the model.
        options: the data and the settings.
        progress: is called as `progress(scored, total)`. `scored` is the number of targets that this process has
            scored. `total` is the number of targets that this process must score.
        world: the processes that share the work.

    Returns:
        The result in bits per byte.

    Raises:
        EvaluateError: the options do not apply to a text model, or the metric of the spec is not bits per byte.
        RunFailure: the loss is not finite, or the GPU has too little memory.
        DataError: the data cannot be read.
    """
    world = world or World.alone()
    windows = windows_of(opened.spec, options, str(opened.path))
    score = compiled(opened, options)(opened.text_model.score)
    with _stream(opened, options, world) as stream, memory():
        text = ScoredText(stream, opened.tokenizer, options.max_tokens)
        share = Share(world.rank, world.size, world.totals)
        result = evaluate_bits(score, text, windows, opened.device, share, progress)
    if not math.isfinite(result.nats):
        raise RunFailure(f"the loss is {result.nats}", "the model is broken: evaluate an earlier checkpoint")
    return replace(result, held_out=_held_out(opened, stream), digest=stream.digest)


def _held_out(opened: OpenedModel, stream: TokenStream) -> bool | None:
    return None if opened.trained_on is None else opened.trained_on.held_out(stream.digest)


def adapting(spec: Spec, options: EvaluateOptions) -> Spec:
    """Returns a copy of the spec in which `options` replaces the windows and the method of adaptation.

    If the model does not adapt and no window exceeds the context, the generated code does not depend on the options.
    The result is then the unchanged spec. If `options.adapt` only names a kind, and `eval.adapt` of the spec has this
    kind, the settings of the spec are used. Raises EvaluateError if the options do not apply to the spec. Raises
    SpecError if the settings are invalid.
    """
    if options.adapt is None and (options.window or 0) <= spec.model.window:
        return spec
    windows = windows_of(spec, options, spec.name)
    over = (f"eval.window={windows.length}", f"eval.stride={windows.step}")
    if options.adapt is None:
        return load(readable(spec), over)[0]
    wanted, stated = (options.adapt or "").strip(), spec.eval.adapt if isinstance(spec.eval, BitsSpec) else None
    settings = wanted if wanted.startswith("{") else f"{{kind: {wanted}}}"
    if stated is not None and stated.kind == wanted:
        settings = stated.model_dump_json()
    return load(readable(spec), (*over, f"eval.adapt={settings}"))[0]


@dataclass(frozen=True, slots=True)
class Adapted:
    """The result of a model that adapted to the text.

    `facts` reports the result under a separate key, because the result is not a score of the unchanged model.

    Attributes:
        how: the settings of the method of adaptation.
        windows: the windows that were scored.
        done: a message about the number of adaptations.
        counted: the result in bits per byte.
    """

    how: Adaptation
    windows: WindowPlan
    done: str
    counted: BitsPerByte

    @property
    def key(self) -> str:
        return "adapted" if self.how.causal else "non_causal"

    def report(self) -> list[str]:
        kind, counted = self.how.kind, self.counted.report()
        if self.how.causal:
            about = f"causal: {kind} predicts each token from {self.how.sees}"
        else:
            about = f"NON-CAUSAL, not the model's score: {kind} is {self.how.leaks}"
        named = f"{kind} ({self.key.replace('_', '-')}), {self.done}"
        return [named, *counted, f"{about}; without --adapt, eval scores the model"]

    def facts(self) -> dict[str, object]:
        method = {
            "method": self.how.kind,
            "causal": self.how.causal,
            "done": self.done,
            "settings": self.how.model_dump(mode="json"),
        }
        windows = {"window": self.windows.length, "stride": self.windows.step}
        return {"causal": self.how.causal, self.key: {**method, **windows, **self.counted.facts()}}


def evaluate_adapted(
    opened: OpenedModel,
    options: EvaluateOptions,
    progress: Callable[[int, int], None] | None = None,
    world: World | None = None,
) -> Adapted:
    """Scores an opened text model with test-time adaptation. The call restores the original weights of the model.

    Results with different numbers of processes differ only by rounding.

    Args:
        opened: the model, with `eval.adapt` in its spec.
        options: the data and the settings.
        progress: is called as `progress(scored, total)`. `scored` is the number of targets that this process has
            scored. `total` is the number of targets that this process must score.
        world: the processes that share the work.

    Returns:
        The result of the adapted model.

    Raises:
        AdaptError: if the settings of the method do not match the model.
        EvaluateError: if the model computes with integers, or the method requires another batch size than
            `options.batch`.
        RunFailure, DataError: as raised by `evaluate_text`.
    """
    world = replace(world or World.alone(), device=opened.device)
    windows, how = windows_of(opened.spec, options, str(opened.path)), opened.spec.eval
    assert isinstance(how, BitsSpec) and how.adapt is not None
    if any(buffer.dtype == torch.int8 for buffer in opened.model.buffers()):
        hint = "adapt the run from before quantization"
        raise EvaluateError(f"{opened.path} computes in integers, which have no gradients", hint)
    method, model, compiles = method_of(how.adapt), opened.model, compiled(opened, options)
    learns = [weight for weight in model.parameters() if weight.requires_grad]
    fixed = method.rows(how.adapt) if method.rows is not None else None
    if fixed is not None and options.batch not in (None, fixed):
        message = f"the settings of {how.adapt.kind} require a batch of {fixed} windows"
        raise EvaluateError(message, "leave --batch out, or set it in the settings of --adapt")
    rows, fewer = (
        (windows.batch, FEWER) if fixed is None else (fixed, "lower the number of windows in the settings of --adapt")
    )
    with _stream(opened, options, world) as stream, memory(fewer):
        text = ScoredText(stream, opened.tokenizer, options.max_tokens)
        account = Account(text, replace(windows, batch=rows), method.chunk(how.adapt))
        text_model = opened.text_model
        score, features, nats = map(compiles, (text_model.score, text_model.features, text_model.nats))
        # Before version 2.12, Torch may reuse a graph that was compiled for another method, while the weights did not
        # require gradients (pytorch/pytorch#139476). Gradients would then lack the contribution of the head.
        torch.compiler.reset()
        work = Work(account, model, score, features, nats, rows, world, opened.spec.train.seed, progress)
        try:
            model.requires_grad_(False)
            done = method.run(how.adapt, work)
        finally:
            for weight in learns:
                weight.requires_grad_()
        result = account.total(work.share)
    if not math.isfinite(result.nats):
        raise RunFailure(
            f"the loss is {result.nats}", "the model is broken, or the learning rate of eval.adapt is too high"
        )
    return Adapted(how.adapt, windows, done, replace(result, held_out=_held_out(opened, stream)))


def compiled(opened: OpenedModel, options: EvaluateOptions) -> Callable[[Any], Any]:
    """Returns the function that compiles modules. It is torch.compile if the model is on a GPU and `options.compiled`
    is True. Otherwise, it is the identity function.
    """
    return partial(torch.compile, fullgraph=True) if options.compiled and opened.device.type == "cuda" else lambda f: f


@contextmanager
def _stream(opened: OpenedModel, options: EvaluateOptions, world: World) -> Iterator[TokenStream]:
    data = options.data or opened.data
    if data is None:
        raise EvaluateError(f"{opened.path} does not state its training data", "name the data with --data PATH")
    with world.in_turn("data"):  # rank 0 tokenizes; the other ranks read its cache
        stream = open_stream(data, "val", opened.tokenizer, options.cache or token_cache())
    try:
        world.require_same("data", {"digest": stream.digest})
        yield stream
    finally:
        stream.close()
