"""Trains, quantizes, evaluates and exports what the compiler generated."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["LAYERS", "load"]

# Folders and modules from the lowest layer to the highest. Each may import itself and what stands before it.
LAYERS = (
    "errors",
    "dtypes",
    "log",
    "support",
    "storage",
    "model",
    "distributed",
    "artifact",
    "data",
    "open_model",
    "decode",
    "generate",
    "metrics",
    "calibration",
    "optim",
    "train",
    "eval",
    "quantize",
    "export",
    "submission",
    "verify",
    "bench",
    "tune",
)


def load(path: str | Path, *, target: str | None = None, device: str | None = None) -> "nn.Module":
    """The model of a run directory or a `.specc` artifact, in eval mode, in the dtypes of its target.

    It has `model(ids, targets)`, the mean loss in nats, f32 []; `model.score(ids, targets)`, the nats of each
    target, f32 [B, T]; and `prefill`, `decode` and `new_cache` for generation. ids and targets are i64 [B, T]
    on the device of the target, `cuda` or `cpu`. Without `target` the best one that runs here is taken. No
    code that a file holds is ever executed. Raises as `specc.runtime.open_model.open_model` does.

    A model of pairs of lines has `model(source, inputs, target)`, `model.score(source, target)`, `encode` and
    `extend`, and `model.translate(lines)`, which turns a list of lines into the list of theirs.

    An artifact whose products are int8 runs from its codes: it has all of these but `model(...)`, which trains, and
    wants a CUDA toolkit on a GPU, where its kernels are compiled once, a minute or so.

    All but `model(...)` raise ValueError for what is no i64 tensor of ids of the vocabulary, is empty or longer than
    the context, or does not fit the other inputs. On a GPU `extend` and `decode`, which run once a token, look at
    shapes alone: to look at ids they would wait for the device.
    """
    from specc.runtime.decode.lines import translator_of
    from specc.runtime.model.guards import check_programs
    from specc.runtime.open_model import open_model

    opened = open_model(Path(path), target, device)
    if opened.spec.model.reads == "lines":
        opened.model.translate = translator_of(opened).translate  # type: ignore[assignment]
    check_programs(opened.model, opened.loaded.programs, opened.spec.model.vocabulary)
    return opened.model
