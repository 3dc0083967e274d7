"""The options of an evaluation, and the windows that they select for a text model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from specc.compiler.spec.spec import Spec
from specc.compiler.spec.train import BitsSpec
from specc.runtime.data.windows.evaluation import WindowPlan
from specc.runtime.errors import RunFailure, RuntimeFailure

FEWER = "lower --batch, or eval.batch in the spec"  # the hint if GPU memory is full


class EvaluateError(RuntimeFailure):
    """Raised if a model cannot be scored with the given options, for example if no data are named."""

    code = "U009"
    exit_code = 2


@dataclass(frozen=True, slots=True)
class EvaluateOptions:
    """The options of an evaluation. For an option that is None, the spec, the run or the machine gives the default.

    Attributes:
        data: the data to score. For a text model, the option is a source that
            `specc.runtime.data.windows.stream.open_stream` accepts. For a model that maps lines to lines, the option is
            a file or a name of held-out splits: `TASK` names all splits of the task, and `TASK:SPLIT` names one split.
            None selects the data of the run.
        stride: the distance between the starts of adjacent windows, in tokens, from 1 to the window length.
        batch: the number of windows, or lines, per batch.
        max_tokens: the maximum number of tokens to score, from the start of the split. For a model that maps lines to
            lines, only target tokens count.
        cache: the folder of tokenized text.
        compiled: whether the model is compiled by torch.compile on a GPU.
        window: the length of a window in tokens. The length may exceed the context, unless the model has learned
            position embeddings.
        adapt: the method of test-time adaptation: the name of its `kind`, or a YAML mapping of its settings. If `adapt`
            is None, the model does not adapt, even if the spec has `eval.adapt`.
        hopeless: the number of lines after which scoring stops if none of these lines is an exact match. Each set of
            lines is treated separately. None scores all lines.
    """

    data: str | None = None
    stride: int | None = None
    batch: int | None = None
    max_tokens: int | None = None
    cache: Path | None = None
    compiled: bool = True
    window: int | None = None
    adapt: str | None = None
    hopeless: int | None = None

    def __post_init__(self) -> None:
        if self.data is not None and not self.data.strip():
            raise EvaluateError("--data is empty", "name the data, or leave --data out to use the data of the run")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise EvaluateError(f"cannot score {self.max_tokens} tokens", "give a positive --max-tokens")


def windows_of(spec: Spec, options: EvaluateOptions, name: str) -> WindowPlan:
    """Returns the settings of the windows that `options` selects for a text model. The spec gives the defaults.

    `name` is the name of the model in messages. Raises EvaluateError if the metric of the spec is not bits per byte, or
    if the window or the stride is out of range.
    """
    context, how = spec.model.window, spec.eval
    if not isinstance(how, BitsSpec):
        raise EvaluateError(f"{name} is scored by {how.metric}, not in bits per byte", "see `eval:` in the spec")
    window = how.window or context if options.window is None else options.window
    if window < 1 or (spec.model.bounded and window > context):
        reason = f", the length of the learned {spec.model.bounded}" if spec.model.bounded else ""
        message = f"the window {window} is not in 1 .. {context}, the context of the model{reason}"
        raise EvaluateError(message, "change --window")
    stride = how.stride if options.stride is None else options.stride
    if options.stride is None and stride is not None and options.window is not None:
        # The stride in the spec may exceed the requested window
        stride = min(stride, window)
    if stride is not None and not 1 <= stride <= window:
        what = "context" if window == context else "window"
        raise EvaluateError(f"the stride is {stride}, but must be from 1 to {window}, the {what}", "change --stride")
    if window <= spec.model.unscored:
        message = f"a window of {window} tokens is shorter than the prefix of {spec.model.unscored + 1} tokens"
        raise EvaluateError(message, "use a larger --window")
    return WindowPlan(window, options.batch or how.batch, window if stride is None else stride, spec.model.unscored)


@contextmanager
def memory(hint: str = FEWER) -> Iterator[None]:
    """A context manager that raises RunFailure with `hint` if its block runs out of GPU memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunFailure("out of GPU memory", hint) from error
