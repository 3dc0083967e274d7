"""Opens a run directory or a `.specc` artifact as a module that is ready to run.

The installed compiler generates the code of the module from the spec. No code from the run or the artifact is executed.
"""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

import torch
from platformdirs import user_cache_path
from torch import Tensor, nn

from specc.compiler.int8.products import integer_products
from specc.compiler.pipeline import lower
from specc.compiler.plan.lock import NO_LOCK, Lock
from specc.compiler.spec.spec import Spec
from specc.runtime.artifact.artifact import read_artifact
from specc.runtime.artifact.deployment import Deployment, deployment_of
from specc.runtime.artifact.int8_products import constants, fill, require_products
from specc.runtime.artifact.quantized_model import QuantizedModel, dequantized
from specc.runtime.artifact.table import Layout, require_values, unpacked
from specc.runtime.data.tokenizers.characters import CharTokenizer
from specc.runtime.data.tokenizers.from_spec import characters_of, tokenizer_of
from specc.runtime.data.tokenizers.tokenizer import Tokenizer
from specc.runtime.dtypes import DTYPES
from specc.runtime.errors import IntegrityError, RunFailure
from specc.runtime.model.load import Loaded, choose_target, device_asked_for, initialize, instantiate
from specc.runtime.model.parameters import assign, place
from specc.runtime.model.protocols import GeneratedLines, GeneratedText, line_model, text_model
from specc.runtime.storage import checkpoint
from specc.runtime.storage.data_digests import DataDigests
from specc.runtime.storage.quantized_run import quantized_artifact
from specc.runtime.storage.run_directory import FILES, Run, require_path
from specc.runtime.support.native import compile_ahead

Say = Callable[[str], None]
Prepare = Callable[[Spec], Spec]


@dataclass(frozen=True)
class OpenedModel:
    """A model that is ready to run. The module is in eval mode, on `device`. Its parameters have their compute dtypes.

    Attributes:
        spec: the spec of the run or artifact.
        loaded: the module, with its spec, target and programs.
        source: `run` or `artifact`, the kind of `path`.
        path: the run or the artifact.
        device: the device of the parameters.
        same_code: whether this compiler generates the same code as the compiler that wrote the artifact. If False,
            results may differ in the last bits. None if the model was opened from a run.
        data: the training data, in the format of `specc train --data`. None if the user opened an artifact directly.
        search: the folders that are searched for the tokenizer.
        trained_on: the digests of the training data; None if unknown.
        step: the step of the checkpoint whose weights were opened; None for an artifact.
    """

    spec: Spec
    loaded: Loaded
    source: Literal["run", "artifact"]
    path: Path
    device: torch.device
    same_code: bool | None
    data: str | None
    search: tuple[Path, ...]
    trained_on: DataDigests | None = None
    step: int | None = None

    @property
    def model(self) -> nn.Module:
        return self.loaded.model

    @property
    def text_model(self) -> GeneratedText:
        return text_model(self.loaded.model)

    @property
    def line_model(self) -> GeneratedLines:
        return line_model(self.loaded.model)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.spec, self.search)

    @property
    def characters(self) -> CharTokenizer:
        return characters_of(self.spec)


def open_model(
    path: Path,
    target: str | None = None,
    device: str | None = None,
    *,
    quantized: bool = False,
    search: Sequence[Path] = (),
    say: Say | None = None,
    prepared: Prepare = lambda spec: spec,
) -> OpenedModel:
    """Opens the model of an artifact, or of a run at its newest valid checkpoint.

    Args:
        path: the run directory or the artifact.
        target: a target of the spec. None selects the best target that this machine can run.
        device: `cpu`, `cuda`, or a specific GPU such as `cuda:1`. None selects the device of the target.
        quantized: whether to open the quantized model of a run.
        search: additional folders to search for the tokenizer.
        say: called with messages about damaged checkpoints, outdated artifacts, and artifacts of other versions of
            specc.
        prepared: a function that maps the stored spec to the spec from which code is generated. The function must not
            change the parameters of the model.

    Returns:
        The opened model.

    Raises:
        RunDirectoryError: if `path` is neither a run nor an artifact.
        IntegrityError: if a file is damaged or inconsistent.
        RunFailure: if the run has no checkpoint, or no target of the spec runs on this machine.
        TargetError: if the spec does not list the target, or the device is neither a CPU nor an NVIDIA GPU.
        EnvironmentFailure: if the GPU does not exist.
    """
    say = say or (lambda _: None)
    if path.is_dir():
        run = Run.open(path)
        if quantized:
            places = _places(run, search)
            return _open_artifact(quantized_artifact(run, say), target, device, places, say, run.data, prepared)
        run, weights, step = as_trained(run, say)
        run = replace(run, spec=prepared(run.spec))
        return replace(opened_run(run, weights, target, device, search), step=step)
    require_path(path)
    # If the artifact is still in the directory of its run, the first of these folders exists
    places = (path.parent.parent / FILES, *search, path.parent)
    return _open_artifact(path, target, device, places, say, None, prepared)


def opened_run(
    run: Run, weights: Mapping[str, Tensor], target: str | None, device: str | None, search: Sequence[Path] = ()
) -> OpenedModel:
    """Opens the model of a run with the given weights, instead of the weights of a checkpoint.

    Args:
        run: the run.
        weights: f32 parameters by name.
        target: a target of the spec. None selects the best target that this machine can run.
        device: `cpu`, `cuda`, or a specific GPU such as `cuda:1`. None selects the device of the target.
        search: additional folders to search for the tokenizer.

    Returns:
        The opened model.

    Raises:
        TargetError, RunFailure, EnvironmentFailure, IntegrityError: as raised by `realize`.
    """
    loaded = realize(run.spec, target, device, weights, lock=run.lock)
    where, places = device_asked_for(loaded.target, device), _places(run, search)
    return OpenedModel(run.spec, loaded, "run", run.directory, where, None, run.data, places, run.data_digests)


def realize(
    spec: Spec,
    target: str | None,
    device: str | None,
    weights: Mapping[str, Tensor] | int,
    fuse: bool = True,
    lock: Lock = NO_LOCK,
    constants: Mapping[str, Tensor] | None = None,
) -> Loaded:
    """Generates the module of a spec, fills its parameters, and moves it to the device, in eval mode.

    The generated code is in a temporary folder that only this user can read. The folder is deleted when the module is
    freed.

    Args:
        spec: the spec.
        target: a target of the spec. None selects the best target that this machine can run.
        device: `cpu`, `cuda`, or a specific GPU such as `cuda:1`. None selects the device of the target.
        weights: f32 parameters by name, or the seed of initial weights.
        fuse: whether to fuse nodes at the fusion points of the spec.
        lock: the kernels that `specc tune` measured as the fastest.
        constants: the constants of int8 programs, by name. None generates a module without int8 products.

    Returns:
        The module with its spec, target and programs.

    Raises:
        TargetError: if the spec does not list the target, or the device is neither a CPU nor an NVIDIA GPU.
        RunFailure: if no target of the spec runs on this machine.
        EnvironmentFailure: if the GPU does not exist.
        IntegrityError: if the names or shapes of the weights do not match the model.
    """
    target = choose_target(spec, target)
    directory = Path(tempfile.mkdtemp(prefix="specc-"))
    try:
        loaded = instantiate(spec.at_rest, target, directory, fuse, lock, constants is not None)
        if isinstance(weights, int):
            initialize(loaded, weights)
        else:
            assign(loaded.model, _at_rest(spec, target, weights))
        if constants is not None:
            fill(loaded, constants)
        where = device_asked_for(loaded.target, device)
        if constants is not None and where.type == "cuda":
            # Kernels are compiled in parallel. Compiling each kernel at its first call would take minutes.
            compile_ahead(loaded.directory)
        dtypes = {param.name: DTYPES[param.dtype] for param in loaded.programs.params if param.dtype in DTYPES}
        place(loaded.model, dtypes, where)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    weakref.finalize(loaded.model, shutil.rmtree, directory, ignore_errors=True)
    return loaded


def _at_rest(spec: Spec, target: str, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns the weights that the model needs for scoring on `target`. The result omits weights that only training
    uses, such as the weights of an auxiliary loss.
    """
    if spec.at_rest.train.losses == spec.train.losses:
        return weights
    trained, deployed = ({param.name for param in lower(form, target).params} for form in (spec, spec.at_rest))
    return {name: weight for name, weight in weights.items() if name in deployed or name not in trained}


def realize_stored(
    spec: Spec, target: str | None, device: str | None, stored: QuantizedModel, weights: Mapping[str, Tensor]
) -> Loaded:
    """Generates the module of a quantized model.

    The module computes a matrix product in int8 if the storage scheme of the weight allows int8. All other parameters
    are dequantized. If the model has no int8 products, the result also contains the stored arrays, because decoding
    steps can read them.

    Args:
        spec: the spec.
        target: a target of the spec. None selects the best target that this machine can run.
        device: `cpu`, `cuda`, or a specific GPU such as `cuda:1`. None selects the device of the target.
        stored: the stored arrays, with their schemes.
        weights: the dequantized values of `stored`, f32, by parameter name.

    Returns:
        The module with its spec, target and programs.

    Raises:
        IntegrityError: if the stored arrays are inconsistent.
        TargetError, RunFailure, EnvironmentFailure: as raised by `realize`.
    """
    sources = integer_products(lower(spec, choose_target(spec, target)), stored.schemes)
    if not sources:
        return replace(realize(spec, target, device, weights), stored=stored.tensors)
    floats = {name: weight for name, weight in weights.items() if not stored.schemes[name].integer}
    return realize(spec, target, device, floats, constants=constants(sources, stored))


def final_weights(run: Run, say: Say) -> tuple[dict[str, Tensor], int]:
    """Returns the f32 weights of the newest valid checkpoint of a run, by parameter name, and the step of the
    checkpoint.

    `say` is called with messages about damaged checkpoints. Raises RunFailure if the run has not written a
    checkpoint. Raises IntegrityError if no checkpoint is valid, or if the newest was trained with another spec.
    """
    newest, state = _newest(run, say)
    return checkpoint.weights(newest), state.step


def _newest(run: Run, say: Say) -> tuple[Path, checkpoint.State]:
    newest = checkpoint.latest_of(run, say)
    if newest is None:
        raise RunFailure(f"{run.directory} has no checkpoint", f"train the run: {run.resume_command}")
    state = checkpoint.read_state(newest)
    if state.spec_digest != run.spec_digest:
        message = f"{run.directory}: its spec.json is not the spec that {newest.name} was trained with"
        raise IntegrityError(message, "restore spec.json; to train with another spec, start a new run")
    return newest, state


def as_trained(run: Run, say: Say) -> tuple[Run, dict[str, Tensor], int]:
    """Returns three values: the run with the spec of its current phase, the f32 weights of this phase by parameter
    name, and the step of the checkpoint.

    The current phase is the phase of the newest valid checkpoint. It may be earlier than the last phase of the spec.
    `say` is called with messages about damaged checkpoints, and with a message if the phase is not the last phase.
    Raises RunFailure if the run has not written a checkpoint. Raises IntegrityError if no checkpoint is valid, or if
    the newest was trained with another spec.
    """
    newest, state = _newest(run, say)
    weights = checkpoint.weights(newest)
    model = run.spec.model.after(state.done)
    if model == run.spec.model.after(1.0):
        return run, weights, state.step
    spec = run.spec.model_copy(update={"model": model})
    read = {param.name for param in lower(spec, run.target).params}
    say(f"the run ended before the last phase of its spec: the model is that of the trained phase, {model.title}")
    return replace(run, spec=spec), {name: weights[name] for name in weights if name in read}, state.step


def spec_at(path: Path) -> Spec:
    """Returns the spec of a run or an artifact. Raises RunDirectoryError and IntegrityError as `open_model` does."""
    if path.is_dir():
        return Run.open(path).spec
    require_path(path)
    return read_verified(path).spec


def token_cache() -> Path:
    """Returns the default folder of tokenized text."""
    return user_cache_path("specc") / "tokens"


class DataChoice(Protocol):
    """The options of a command that reads the data of a run: `--data` and `--cache`."""

    @property
    def data(self) -> str | None: ...
    @property
    def cache(self) -> Path | None: ...


def data_of(run: Run, options: DataChoice) -> tuple[str, Path]:
    """Returns the data that a command reads, and the folder that caches tokenized text.

    For an option that is None, the default is the data of the run, or the cache folder of the user.
    """
    return options.data or run.data, options.cache or token_cache()


@dataclass(frozen=True, slots=True)
class Verified:
    """The verified content of an artifact.

    Attributes:
        spec: the spec.
        stored: the arrays in their storage formats.
        weights: the dequantized parameters, f32, by name.
        same_code: whether this compiler generates the same code as the compiler that wrote the artifact.
        trained_on: the digests of the training data; None if unknown.
    """

    spec: Spec
    stored: QuantizedModel
    weights: dict[str, Tensor]
    same_code: bool
    trained_on: DataDigests | None = None


def read_verified(path: Path) -> Verified:
    """Reads and verifies a whole artifact. Raises IntegrityError if the artifact is damaged or inconsistent."""
    resolved: list[tuple[Spec, Deployment]] = []

    def expected(text: bytes) -> tuple[bytes, Layout]:
        resolved.append(deployment_of(text))
        return resolved[0][1].interface, resolved[0][1].layout

    def judge(text: bytes) -> None:
        spec, deployment = resolved[0]
        if deployment.integer:
            sources = integer_products(lower(spec, spec.targets[0]), deployment.schemes)
            require_products(sources, deployment.shapes, deployment.layout, text)

    artifact = read_artifact(path, expected, judge=judge)
    spec, deployment = resolved[0]
    model = QuantizedModel(deployment.schemes, deployment.shapes, artifact.tensors)
    try:
        if deployment.integer:
            require_values(unpacked(artifact.table), artifact.tensors)
        weights = dequantized(model)
    except IntegrityError as error:
        raise IntegrityError(f"{path}: {error.message}", error.hint) from error
    return Verified(spec, model, weights, artifact.code == deployment.code, artifact.trained_on)


def _open_artifact(
    path: Path,
    target: str | None,
    device: str | None,
    search: tuple[Path, ...],
    say: Say,
    data: str | None,
    prepared: Prepare,
) -> OpenedModel:
    verified = read_verified(path)
    if not verified.same_code:
        say(f"{path}: this version of specc generates different code, so results may differ in the last bits")
    spec = prepared(verified.spec)
    try:
        loaded = realize_stored(spec, target, device, verified.stored, verified.weights)
    except IntegrityError as error:
        raise IntegrityError(f"{path}: {error.message}", error.hint) from error
    where = device_asked_for(loaded.target, device)
    return OpenedModel(spec, loaded, "artifact", path, where, verified.same_code, data, search, verified.trained_on)


def _places(run: Run, search: Sequence[Path]) -> tuple[Path, ...]:
    data = Path(run.data)
    return (run.files, *search, data if data.is_dir() else data.parent)
