"""Opens a run directory or a `.specc` artifact as a module that is ready to run.

Neither holds code that is trusted: the module is rendered from the spec by the compiler that is installed.
"""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from platformdirs import user_cache_path
from torch import Tensor, nn

from specc.compiler.int8.products import integer_products
from specc.compiler.pipeline import lower
from specc.compiler.plan.lock import NO_LOCK, Lock
from specc.compiler.spec.spec import Spec
from specc.runtime.artifact.artifact import read_artifact
from specc.runtime.artifact.constants import constants, fill
from specc.runtime.artifact.deployment import Deployment, deployment_of
from specc.runtime.artifact.layout import Layout
from specc.runtime.artifact.stored import require_products
from specc.runtime.artifact.table import require_values, unpacked
from specc.runtime.artifact.tensors import QuantizedModel, dequantized
from specc.runtime.data.tokenizers.characters import CharTokenizer
from specc.runtime.data.tokenizers.from_spec import characters_of, tokenizer_of
from specc.runtime.data.tokenizers.tokenizer import Tokenizer
from specc.runtime.dtypes import DTYPES
from specc.runtime.errors import IntegrityError, RunFailure
from specc.runtime.model.load import Loaded, assign, choose_target, device_asked_for, instantiate
from specc.runtime.model.protocols import GeneratedLines, GeneratedText, line_model, text_model
from specc.runtime.storage import checkpoint
from specc.runtime.storage.data_digests import DataDigests
from specc.runtime.storage.quantized_run import quantized_artifact
from specc.runtime.storage.run_directory import KEPT, Run, RunDirectoryError
from specc.runtime.support.native import compile_ahead

Say = Callable[[str], None]
Prepare = Callable[[Spec], Spec]


@dataclass(frozen=True)
class OpenedModel:
    """A model in eval mode on `device`, its parameters in the dtypes that its target computes in.

    Attributes:
        spec: of the run, or the resolved spec of the artifact.
        loaded: the module, with the spec, target and programs that it was generated from.
        source: the kind of file that it was opened from.
        path: the run or the artifact.
        device: device of the parameters.
        same_code: whether this compiler generates the code that the artifact was written with; None for a run. Other
            code computes the same function, but maybe not to the last bit.
        data: the training data, as `--data` names it; None for an artifact outside its run.
        trained_on: digests of the training data; None where neither run nor artifact states them.
        search: folders to look for the tokenizer in.
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

    @property
    def model(self) -> nn.Module:
        return self.loaded.model

    @property
    def text_model(self) -> GeneratedText:
        """The methods of a model of text."""
        return text_model(self.loaded.model)

    @property
    def line_model(self) -> GeneratedLines:
        """The methods of a model of lines."""
        return line_model(self.loaded.model)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the spec names. Raises DataError as `tokenizer_of`."""
        return tokenizer_of(self.spec, self.search)

    @property
    def characters(self) -> CharTokenizer:
        """The characters of a model of lines. Raises DataError for a model of text."""
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
    """The model of a run, with the weights that the run ends with, or of an artifact.

    Args:
        path: the run directory or the artifact.
        target: a target of the spec; None takes the best that this machine can run.
        device: `cpu`, `cuda` or one GPU as `cuda:1`; None takes the device of the target.
        quantized: for a run, open its quantized model.
        search: more folders to look for the tokenizer in.
        say: is told of damaged checkpoints that are passed over, of an artifact of another compiler, and of one of
            older weights than the run has.
        prepared: maps the spec that was read to the spec that the code is generated from; parameters stay the same.

    Raises RunDirectoryError when there is neither at `path`; IntegrityError when anything about the file is
    wrong, with nothing of it handed out; RunFailure for a run without a checkpoint, a target that does not
    run here; TargetError for another target or device; EnvironmentFailure without the GPU.
    """
    say = say or (lambda _: None)
    if path.is_dir():
        run = Run.open(path)
        if quantized:
            places = _places(run, search)
            return _open_artifact(quantized_artifact(run, say), target, device, places, say, run.data, prepared)
        run, weights, _ = as_trained(run, say)
        run = replace(run, spec=prepared(run.spec))
        return opened_run(run, weights, target, device, search)
    if not path.exists():
        raise RunDirectoryError(f"{path}: no such run or artifact", "name a run directory or a .specc file")
    places = (path.parent.parent / KEPT, *search, path.parent)  # the first of an artifact that is still in its run
    return _open_artifact(path, target, device, places, say, None, prepared)


def opened_run(
    run: Run,
    weights: Mapping[str, Tensor],
    target: str | None,
    device: str | None,
    search: Sequence[Path] = (),
) -> OpenedModel:
    """As `open_model` of a run, with these weights (f32, by parameter name)."""
    loaded = realize(run.spec, target, device, weights, lock=run.lock)
    where, places = device_asked_for(loaded.target, device), _places(run, search)
    return OpenedModel(run.spec, loaded, "run", run.directory, where, None, run.data, places, run.data_digests)


def realize(
    spec: Spec,
    target: str | None,
    device: str | None,
    weights: Mapping[str, Tensor],
    fuse: bool = True,
    lock: Lock = NO_LOCK,
    constants: Mapping[str, Tensor] | None = None,
) -> Loaded:
    """The module of `spec` with `weights` (f32, by parameter name), in eval mode on the device of its target.

    Without `fuse` it is the unfused one; with `constants`, by name, that of the deployed programs. Its code lies in a
    folder that only this user can open, and that goes with the module.
    """
    target = choose_target(spec, target)
    directory = Path(tempfile.mkdtemp(prefix="specc-"))
    try:
        loaded = instantiate(spec.at_rest, target, directory, fuse, lock, constants is not None)
        assign(loaded, weights)
        fill(loaded, constants or {})
        where = device_asked_for(loaded.target, device)
        if constants is not None and where.type == "cuda":
            compile_ahead(loaded.directory)  # side by side: one after another they would take minutes
        kinds = {p.name: DTYPES[p.dtype] for p in loaded.programs.params if p.dtype in DTYPES}
        for name, parameter in loaded.model.named_parameters():
            parameter.data = parameter.data.to(where, kinds[name])
        for buffer in loaded.model.buffers():
            buffer.data = buffer.data.to(where)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    loaded.model.eval()
    weakref.finalize(loaded.model, shutil.rmtree, directory, ignore_errors=True)
    return loaded


def realize_stored(
    spec: Spec, target: str | None, device: str | None, stored: QuantizedModel, weights: Mapping[str, Tensor]
) -> Loaded:
    """The module that runs from stored arrays, of which `weights` are what they stand for: its products are computed in
    whole numbers where their schemes say so. Raises IntegrityError where the arrays do not fit together."""
    sources = integer_products(lower(spec, choose_target(spec, target)), stored.schemes)
    if not sources:
        return realize(spec, target, device, weights)
    floats = {name: weight for name, weight in weights.items() if not stored.schemes[name].integer}
    return realize(spec, target, device, floats, constants=constants(sources, stored))


def final_weights(run: Run, say: Say) -> tuple[dict[str, Tensor], int]:
    """The weights of the run at its newest sound checkpoint (f32, by parameter name), and the step of that.

    Raises RunFailure where there is no checkpoint.
    """
    newest = _newest(run, say)
    return checkpoint.weights(newest), checkpoint.read_state(newest).step


def _newest(run: Run, say: Say) -> Path:
    newest = checkpoint.latest(run.checkpoints, say)
    if newest is None:
        raise RunFailure(f"{run.directory} has no sound checkpoint", f"train it: {run.resume_command}")
    return newest


def as_trained(run: Run, say: Say) -> tuple[Run, dict[str, Tensor], int]:
    """The run as of the model that its newest sound checkpoint trained, of all phases of the spec the one then; with
    `final_weights`, those that this model reads. Raises RunFailure where there is no checkpoint."""
    newest = _newest(run, say)
    weights, state = checkpoint.weights(newest), checkpoint.read_state(newest)
    model = run.spec.model.after(state.done)
    if model == run.spec.model:
        return run, weights, state.step
    spec = run.spec.model_copy(update={"model": model})
    read = {param.name for param in lower(spec, run.target).params}
    say(f"the run ended before a later phase of its spec: the model is the one that it trained, {model.title}")
    return replace(run, spec=spec), {name: weights[name] for name in weights if name in read}, state.step


def spec_at(path: Path) -> Spec:
    """The spec of a run or of an artifact. Raises as `open_model` does."""
    if path.is_dir():
        return Run.open(path).spec
    if not path.exists():
        raise RunDirectoryError(f"{path}: no such run or artifact", "name a run directory or a .specc file")
    return read_verified(path).spec


def token_cache() -> Path:
    """The default folder of tokenized text."""
    return user_cache_path("specc") / "tokens"


@dataclass(frozen=True, slots=True)
class Verified:
    """The content of an artifact.

    Attributes:
        spec: the resolved spec.
        stored: the arrays as they are stored.
        weights: the parameters that they stand for, f32, by name.
        same_code: whether this compiler generates the very code that the artifact was written with.
        trained_on: digests of the training data; None where the artifact does not state them.
    """

    spec: Spec
    stored: QuantizedModel
    weights: dict[str, Tensor]
    same_code: bool
    trained_on: DataDigests | None = None


def read_verified(path: Path) -> Verified:
    """All of an artifact. Raises IntegrityError, handing out nothing, when anything is wrong."""
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
        say(f"{path} was written with other generated code: results may differ in the last bits")
    spec = prepared(verified.spec)
    try:
        loaded = realize_stored(spec, target, device, verified.stored, verified.weights)
    except IntegrityError as error:
        raise IntegrityError(f"{path}: {error.message}", error.hint) from error
    where = device_asked_for(loaded.target, device)
    return OpenedModel(spec, loaded, "artifact", path, where, verified.same_code, data, search, verified.trained_on)


def _places(run: Run, search: Sequence[Path]) -> tuple[Path, ...]:
    """Where the tokenizer of a run may be: in the run, where the caller says, beside the data."""
    data = Path(run.data)
    return (run.files, *search, data if data.is_dir() else data.parent)
