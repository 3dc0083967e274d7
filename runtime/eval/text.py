"""Scores a model of text in bits per byte, as it is or as a method that adapts makes it."""

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
from specc.runtime.eval.options import EvaluateError, EvaluateOptions, windows_of
from specc.runtime.metrics.bits_per_byte import Account, BitsPerByte, ScoredText, evaluate_bits
from specc.runtime.metrics.share import Share
from specc.runtime.model.protocols import text_model_in_halves
from specc.runtime.open_model import OpenedModel, token_cache
from specc.runtime.storage.run_directory import readable

FEWER = "lower --batch, or eval.batch in the spec"  # where memory is full


def evaluate_text(
    opened: OpenedModel,
    options: EvaluateOptions,
    progress: Callable[[int, int], None] | None = None,
    world: World | None = None,
) -> BitsPerByte:
    """Bits per byte of an opened model of text. `audit()` of it says whether the two ways to count bytes agree.

    Any number of processes gives the same number, on devices of one kind. Raises EvaluateError (2) for options that
    fit no model, RunFailure (4) when the loss is not finite or memory is full, DataError for the data.
    """
    world = world or World.alone()
    windows = windows_of(opened.spec, options, str(opened.path))
    score = _compiled(opened, options)(opened.text_model.score)
    with _stream(opened, options, world) as stream, _memory():
        text = ScoredText(stream, opened.tokenizer, options.max_tokens)
        share = Share(world.rank, world.size, world.totals)
        result = evaluate_bits(score, text, windows, opened.device, share, progress)
    if not math.isfinite(result.nats):
        raise RunFailure(f"the loss is {result.nats}", "the model is broken: evaluate an earlier checkpoint")
    return replace(result, held_out=_held_out(opened, stream))


def _held_out(opened: OpenedModel, stream: TokenStream) -> bool | None:
    """Whether the text is the split that training left out; None where that is not known."""
    return None if opened.trained_on is None else opened.trained_on.held_out(stream.digest)


def adapting(spec: Spec, options: EvaluateOptions) -> Spec:
    """The spec with the windows and the adaptation that were asked for; the settings of one that is only named are
    those of the spec, where it has that kind. Raises EvaluateError and SpecError (2)."""
    windows = windows_of(spec, options, spec.name)
    wanted, own = (options.adapt or "").strip(), spec.eval.adapt if isinstance(spec.eval, BitsSpec) else None
    settings = wanted if wanted.startswith("{") else f"{{kind: {wanted}}}"
    if own is not None and own.kind == wanted:
        settings = own.model_dump_json()
    over = (f"eval.window={windows.length}", f"eval.stride={windows.step}", f"eval.adapt={settings}")
    return load(readable(spec), over)[0]


@dataclass(frozen=True, slots=True)
class Adapted:
    """What a method that adapts a model to the text made of it. It is no score of the model: it has no metric of its
    own and is nothing that takes one, and `facts` keep it under a key that no score has.

    Attributes:
        how: the settings. `how.causal` says whether it could be what a model scores, were it a part of the model.
        windows: as they were.
        done: how often the model adapted, in words.
        counted: every token once, as the score of a model is counted.
    """

    how: Adaptation
    windows: WindowPlan
    done: str
    counted: BitsPerByte

    @property
    def key(self) -> str:
        return "adapted" if self.how.causal else "non_causal"

    def report(self) -> list[str]:
        """For people; the last line says what it is."""
        kind, counted = self.how.kind, self.counted.report()
        if self.how.causal:
            about = f"causal: {kind} predicts each token from {self.how.sees}"
        else:
            about = f"NON-CAUSAL, not the model's score: {kind} is {self.how.leaks}"
        named = f"{kind} ({self.key.replace('_', '-')}), {self.done}"
        return [named, *counted, f"{about}; without --adapt, eval scores the model"]

    def facts(self) -> dict[str, object]:
        """For programs."""
        made = {
            "method": self.how.kind,
            "causal": self.how.causal,
            "done": self.done,
            "settings": self.how.model_dump(mode="json"),
        }
        windows = {"window": self.windows.length, "stride": self.windows.step}
        return {"causal": self.how.causal, self.key: {**made, **windows, **self.counted.facts()}}


def evaluate_adapted(
    opened: OpenedModel,
    options: EvaluateOptions,
    progress: Callable[[int, int], None] | None = None,
    world: World | None = None,
) -> Adapted:
    """What the adaptation in the spec of an opened model of text makes of it. The model is as it was afterwards.

    What a method fits for a batch of windows or for one of them is the same in any number of processes; where weights
    learn, gradients are added up over the processes, and the result is the same but for the rounding of these sums.

    Raises as `evaluate_text` does, AdaptError (2) for settings that do not fit the model.
    """
    world = replace(world or World.alone(), device=opened.device)
    windows, how = windows_of(opened.spec, options, str(opened.path)), opened.spec.eval
    assert isinstance(how, BitsSpec) and how.adapt is not None
    if next(opened.model.buffers(), None) is not None:
        hint = "adapt the run that it was made from, before it was quantized"
        raise EvaluateError(f"{opened.path} computes in whole numbers, through which nothing learns", hint)
    method, model, compiled = method_of(how.adapt), opened.model, _compiled(opened, options)
    learns = [weight for weight in model.parameters() if weight.requires_grad]
    own = method.rows(how.adapt) if method.rows is not None else None
    if own is not None and options.batch not in (None, own):
        message = f"{how.adapt.kind} takes {own} windows at once, as its settings say, and has no other batches"
        raise EvaluateError(message, "leave --batch out, or say it in the settings of --adapt")
    rows, fewer = (windows.batch, FEWER) if own is None else (own, "lower what the settings of --adapt take at once")
    with _stream(opened, options, world) as stream, _memory(fewer):
        text = ScoredText(stream, opened.tokenizer, options.max_tokens)
        account = Account(text, replace(windows, batch=rows), method.chunk(how.adapt))
        halves = text_model_in_halves(model)
        score, features, nats = map(compiled, (halves.score, halves.features, halves.nats))
        # Torch before 2.12 takes a graph that another method had compiled, though weights learn since
        # (pytorch/pytorch#139476), and their gradients would lack what the head gives.
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
        raise RunFailure(f"the loss is {result.nats}", "the model is broken, or eval.adapt learns too fast")
    return Adapted(how.adapt, windows, done, replace(result, held_out=_held_out(opened, stream)))


def _compiled(opened: OpenedModel, options: EvaluateOptions) -> Callable[[Any], Any]:
    """What a function of the model becomes."""
    return partial(torch.compile, fullgraph=True) if options.compiled and opened.device.type == "cuda" else lambda f: f


@contextmanager
def _stream(opened: OpenedModel, options: EvaluateOptions, world: World) -> Iterator[TokenStream]:
    """The text to score, the same in all processes."""
    data = options.data or opened.data
    if data is None:
        raise EvaluateError(f"{opened.path} does not say what to score", "name it with --data PATH")
    with world.in_turn("data"):  # one tokenizes
        stream = open_stream(data, "val", opened.tokenizer, options.cache or token_cache())
    try:
        world.require_same("data", {"digest": stream.digest})
        yield stream
    finally:
        stream.close()


@contextmanager
def _memory(hint: str = FEWER) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunFailure("out of GPU memory", hint) from error
