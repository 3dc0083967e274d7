"""Trains, quantizes, evaluates and exports the models that the compiler generates."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["LAYERS", "build_model", "load"]

# Folders and modules, lowest layer first. Each entry may import only itself and earlier entries.
LAYERS = (
    "errors",
    "dtypes",
    "pictures",
    "tables",
    "log",
    "machine",
    "support",
    "storage",
    "model",
    "distributed",
    "artifact",
    "data",
    "open_model",
    "families",
    "run_facts",
    "model_card",
    "hugging_face",
    "weights",
    "decode",
    "generate",
    "metrics",
    "calibration",
    "optim",
    "trackers",
    "train",
    "eval",
    "quantize",
    "submission",
    "export",
    "report",
    "inspection",
    "verify",
    "bench",
    "tune",
    "sweep",
    "compare",
    "doctor",
)


def build_model(
    spec: str | Path,
    *,
    overrides: Sequence[str] = (),
    target: str | None = None,
    device: str | None = None,
    seed: int | None = None,
) -> "nn.Module":
    """Builds the model of a spec with initial weights, in eval mode.

    The module runs the code that `specc build` generates. Its method `load_state_dict` replaces the weights. `specc ir`
    prints the names of the parameters. The module has the same methods as a module from `load`, except `translate`.

    Args:
        spec: the spec file.
        overrides: texts such as `train.seed=2`. Each text states the path of a field in the spec and a new value.
        target: a target of the spec. None selects the best target that this machine can run.
        device: `cpu`, `cuda`, or a specific GPU such as `cuda:1`. None selects the device of the target.
        seed: the seed of the initial weights. None selects `train.seed` of the spec.

    Returns:
        The module.

    Raises:
        SpecError: if the spec or its lock file is invalid.
        TargetError: if the spec does not list the target, or the device is neither a CPU nor an NVIDIA GPU.
        RunFailure: if no target of the spec runs on this machine.
        EnvironmentFailure: if the GPU does not exist.
    """
    from specc.compiler.plan.lock import lock_path, read_lock
    from specc.compiler.spec.check import load as checked
    from specc.runtime.model.guards import check_programs
    from specc.runtime.open_model import realize

    parsed = checked(Path(spec), overrides)[0]
    lock = read_lock(lock_path(Path(spec), parsed.name))
    loaded = realize(parsed, target, device, parsed.train.seed if seed is None else seed, lock=lock)
    check_programs(loaded.model, loaded.programs, parsed.model.vocabulary)
    return loaded.model


def load(path: str | Path, *, target: str | None = None, device: str | None = None) -> "nn.Module":
    """Loads the model of a run directory or a `.specc` artifact, in eval mode.

    The function never executes code from the run directory or the artifact.

    For a text model, `model(ids, targets)` returns the mean loss in nats, f32 []. `model.score(ids, targets)` returns
    the loss of each target in nats, f32 [B, T]. The methods `new_cache`, `prefill` and `decode` generate text. `ids`
    and `targets` are i64 tensors [B, T] on the device of the model, for B texts of T tokens.

    A model that maps lines to lines has `model(source, inputs, target)`, `model.score(source, target)`, `model.encode`,
    `model.extend` and `model.translate(lines)`. `model.translate(lines)` returns one target line per source line.

    If an artifact has int8 matrix products, the module computes with the stored int8 weights. Such a module has no call
    `model(...)`. On a GPU, these products require a CUDA toolkit, and the first load compiles kernels for about a
    minute.

    Every method raises ValueError for an invalid input. An input is invalid if it is not an i64 tensor of token ids in
    the vocabulary, is empty, is longer than the context, or does not match the shape of another input. The call
    `model(...)` does not check its inputs. On a GPU, `extend` and `decode` do not check the values of token ids,
    because a check would wait for the GPU.

    Args:
        path: the run directory or the artifact.
        target: a target of the spec. None selects the best target that this machine can run.
        device: `cpu`, `cuda`, or a specific GPU such as `cuda:1`. None selects the device of the target.

    Returns:
        The module.

    Raises:
        RuntimeFailure: if the model cannot be loaded. `specc.runtime.open_model.open_model` lists the causes.
    """
    from specc.runtime.decode.lines import translator_of
    from specc.runtime.model.guards import check_programs
    from specc.runtime.open_model import open_model

    opened = open_model(Path(path), target, device)
    if opened.spec.model.reads == "lines":
        opened.model.translate = translator_of(opened).translate  # type: ignore[assignment]
    model = opened.spec.model
    check_programs(opened.model, opened.loaded.programs, model.vocabulary, model.unscored + 1)
    return opened.model
