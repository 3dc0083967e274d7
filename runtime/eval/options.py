"""The options of an evaluation, and the windows that they mean for a model of text."""

from dataclasses import dataclass
from pathlib import Path

from specc.compiler.spec.spec import Spec
from specc.compiler.spec.train import BitsSpec
from specc.runtime.data.windows.evaluation import WindowPlan
from specc.runtime.errors import RuntimeFailure


class EvaluateError(RuntimeFailure):
    """A model cannot be scored with these options: no data, or a stride longer than the window."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class EvaluateOptions:
    """How to score; None takes the value of the spec, the run, or the machine.

    Attributes:
        data: for text, a source as `specc.runtime.data.windows.stream.open_stream` takes it; for lines, a file of
            them, the name of the task for all its held-out splits, or `TASK:SPLIT` for one. None takes the data of the
            run.
        window: tokens of a window, 1 to the context that the model is built for.
        stride: tokens from one window to the next, 1 to the window.
        batch: windows, or lines, that are scored at once.
        max_tokens: score so many tokens from the start of the split only; for lines, tokens of targets.
        cache: folder of tokenized text.
        hopeless: for lines, stop a set of which none of the first `hopeless` lines is exact.
        compiled: use torch.compile on a GPU.
        adapt: how the model adapts to the text, as `kind` or as a YAML mapping; the result is not a score of the
            model. None does not adapt, whatever the spec says.
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
        """Raises EvaluateError for empty data, which are none."""
        if self.data is not None and not self.data.strip():
            raise EvaluateError("--data is empty", "name the data, or leave --data out for those of the run")


def windows_of(spec: Spec, options: EvaluateOptions, name: str) -> WindowPlan:
    """The windows of `options`, else of the spec; `name` is the model's, for messages. Raises EvaluateError for windows
    that the model cannot take."""
    context, how = spec.model.window, spec.eval
    if not isinstance(how, BitsSpec):
        raise EvaluateError(f"{name} is scored by {how.metric}, not in bits per byte", "see `eval:` in its spec")
    window = how.window or context if options.window is None else options.window
    if not 1 <= window <= context:
        message = f"the window {window} is not in 1 .. {context}, the context that the model is built for"
        raise EvaluateError(message, "give another one")
    stride = how.stride if options.stride is None else options.stride
    if options.stride is None and stride is not None and options.window is not None:
        stride = min(stride, window)  # of a spec whose windows are longer
    if stride is not None and not 1 <= stride <= window:
        what = "context" if window == context else "window"
        raise EvaluateError(f"the stride {stride} is not in 1 .. {window}, the {what}", "give another one")
    if options.max_tokens is not None and options.max_tokens < 1:
        raise EvaluateError(f"cannot score {options.max_tokens} tokens", "give a positive --max-tokens")
    return WindowPlan(window, options.batch or how.batch, window if stride is None else stride)
