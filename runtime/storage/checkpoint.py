"""Checkpoints: directories of safetensors and JSON files. Each directory is written completely or not at all.

`checkpoints/step_00000400/` contains model.safetensors (the f32 master weights), optimizer.safetensors,
rng.safetensors, state.json and COMMIT (see committed.py). If the run averages its weights, the directory also contains
ema.safetensors. Tensors are stored by parameter name. If a run starts from existing weights, the directory
`checkpoints/step_00000000/` contains only model.safetensors, state.json and COMMIT.
"""

import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from specc.compiler.strict import StrictModel, Unit
from specc.compiler.text.shell import shell_path
from specc.runtime.errors import IntegrityError, cannot_write
from specc.runtime.log import logged
from specc.runtime.storage import committed
from specc.runtime.storage.committed import Committed, in_words
from specc.runtime.storage.run_directory import Run

STATE = "state.json"
MODEL: Final = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
AVERAGE: Final = "ema.safetensors"
RNG = "rng.safetensors"
_NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The complete state of a run between two steps.

    Attributes:
        step: the number of optimizer updates so far.
        seconds: the training time so far, in seconds.
        weights: the f32 master weights, by parameter name.
        average: the averaged weights, f32, by parameter name. None if the run does not average its weights.
        optimizer: the optimizer state. A key contains the kind of the optimizer, the kind of state, and the name of the
            parameter, such as `adamw.exp_avg/blocks.0.mlp.up`.
        rng: the states of the random number generators as u8 tensors, by the name of the generator.
        loader: the position of the data loader.
        spec_digest: the SHA-256 (hex) of the spec.
        done: the completed fraction of the run before the last update, from 0 to 1.
    """

    step: int
    seconds: float
    weights: Mapping[str, Tensor]
    average: Mapping[str, Tensor] | None
    optimizer: Mapping[str, Tensor]
    rng: Mapping[str, Tensor]
    loader: Mapping[str, int]
    spec_digest: str
    done: float = 1.0

    @property
    def weights_alone(self) -> bool:
        """Whether the snapshot has only initial weights, without the state of optimizers, random numbers and data."""
        return self.step == 0 and not self.rng

    def copied(self) -> "Snapshot":
        """Returns a copy of the snapshot with all tensors in host memory.

        To save memory, a tensor of zeros becomes a view of a single zero. Unused optimizer state is an example.
        """

        def copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {
                name: tensor.detach().to("cpu", copy=True)
                if tensor.detach().contiguous().reshape(-1).view(torch.uint8).any()  # also true for -0.0
                else tensor.new_zeros(()).expand(tensor.shape)
                for name, tensor in tensors.items()
            }

        average = copy(self.average) if self.average is not None else None
        return replace(self, weights=copy(self.weights), average=average, optimizer=copy(self.optimizer))


class State(StrictModel):
    """The content of state.json.

    `weights` names the file with the weights that become the final weights if the run ends at this checkpoint.
    `threads` is the number of CPU threads, because the order of sums depends on this number.
    """

    step: int
    seconds: float
    weights: Literal["model.safetensors", "ema.safetensors"]
    spec_digest: str
    threads: int
    versions: dict[str, str]
    loader: dict[str, int]
    done: Unit = 1.0


def save(folder: Path, snapshot: Snapshot, keep: int = 2) -> Path:
    """Writes `snapshot` as the checkpoint `folder/step_NNNNNNNN`, and returns the path.

    If a checkpoint of the same step exists, it is replaced only if it is damaged. The function then removes all
    checkpoints except the `keep` newest checkpoints. Raises EnvironmentFailure if the checkpoint cannot be written.
    Raises ValueError if `keep` is below 2.
    """
    if keep < 2:
        raise ValueError("`keep` must be at least 2, because the newest checkpoint may be damaged")
    path = path_of(folder, snapshot.step)
    try:
        if path.exists():
            if fault(path) is None:
                return path
            committed.discard(path)
        committed.write(path, _files(snapshot))
        for old in _outdated(folder, keep):
            committed.discard(old)
    except OSError as error:
        again = f"specc train --run {shell_path(folder.parent)} --resume auto"
        raise cannot_write(path, error, f"make it writable, then: {again}") from error
    return path


def save_weights(folder: Path, model: Iterable[bytes], spec_digest: str) -> Path:
    """Writes the initial weights of a run as the checkpoint `folder/step_00000000`.

    Args:
        folder: the folder of the checkpoints of the run.
        model: the content of model.safetensors, in parts. The tensors are f32, by parameter name.
        spec_digest: the SHA-256 (hex) of the spec.

    Raises:
        EnvironmentFailure: if the checkpoint cannot be written.
    """
    path = path_of(folder, 0)
    state = _state(0, 0.0, MODEL, spec_digest, {}, 0.0)
    try:
        committed.write(path, [(MODEL, model), (STATE, [state])])
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


def path_of(folder: Path, step: int) -> Path:
    """Returns the path of the checkpoint of a step."""
    return folder / f"step_{step:08d}"


def all_in(folder: Path) -> list[Path]:
    """Returns the checkpoint directories in `folder`, valid or damaged, oldest first."""
    paths = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step_")))


def latest(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """Returns the newest valid checkpoint in `folder`, or None. For each damaged checkpoint that is newer, the function
    calls `warn` with the reason.
    """
    for path in reversed(all_in(folder)):
        reason = fault(path)
        if reason is None:
            return path
        warn(f"skipping a damaged checkpoint: {reason}")
    return None


def latest_of(run: Run, warn: Callable[[str], None]) -> Path | None:
    """Returns the newest valid checkpoint of a run, or None if the run has not written a checkpoint. Calls `warn` as
    `latest` does.

    Raises IntegrityError if checkpoints were written, but none of them is valid.
    """
    path = latest(run.checkpoints, warn)
    if path is None and (all_in(run.checkpoints) or logged(run.log, "checkpoint")):
        message = f"{run.directory}: every checkpoint of the run is damaged or missing"
        raise IntegrityError(message, "restore the folder checkpoints/ from a copy, or train in another directory")
    return path


def fault(path: Path) -> str | None:
    """Returns the reason why the checkpoint cannot be used, or None if the checkpoint is valid."""
    try:
        load(path)
    except IntegrityError as error:
        return error.message
    return None


def load(path: Path) -> Snapshot:
    """Reads and verifies a checkpoint. Raises IntegrityError if the checkpoint is incomplete, or was changed after it
    was written.
    """
    files = Committed.open(path)
    state = read_state(path)
    if state.step == 0 and files.members.keys() == {STATE, MODEL}:
        model, empty = _tensors(files, MODEL), dict[str, Tensor]()
        return Snapshot(0, state.seconds, model, None, empty, empty, state.loader, state.spec_digest, state.done)
    model, optimizer, rng = (_tensors(files, name) for name in (MODEL, OPTIMIZER, RNG))
    average = _tensors(files, AVERAGE) if state.weights == AVERAGE else None
    if files.members.keys() != {STATE, MODEL, OPTIMIZER, RNG, state.weights}:
        raise IntegrityError(f"{path}: has files that do not belong to a checkpoint", committed.HINT)
    tensors = (model, average, optimizer, rng)
    return Snapshot(state.step, state.seconds, *tensors, state.loader, state.spec_digest, state.done)


def read_state(path: Path) -> State:
    """Reads the state.json of a checkpoint. Raises IntegrityError if the file is missing, or was changed after it was
    written.
    """
    try:
        state = State.model_validate_json(Committed.open(path).read(STATE))
    except ValidationError as error:
        raise IntegrityError(f"{path / STATE}: {in_words(error)}", committed.HINT) from None
    if path.name != f"step_{state.step:08d}":
        raise IntegrityError(
            f"{path / STATE}: states step {state.step}, but its directory is {path.name}", committed.HINT
        )
    return state


def weights(path: Path) -> dict[str, Tensor]:
    """Returns the weights that become the final weights if the run ends at this checkpoint, f32, by parameter name.

    If the run averages its weights, the result is the averaged weights. Otherwise, the result is the master weights.
    Raises IntegrityError if the checkpoint is incomplete, or was changed after it was written.
    """
    return _tensors(Committed.open(path), read_state(path).weights)


def require_match(what: str, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises IntegrityError if `tensors` and `expected` differ in names, shapes or dtypes.

    The message lists the differences, and begins with `what`.
    """
    differences = [f"it has no {name}" for name in expected if name not in tensors]
    differences += [f"{name} is unknown" for name in tensors if name not in expected]
    differences += [
        f"{name} is {_form(tensors[name])} and should be {_form(expected[name])}"
        for name in expected
        if name in tensors and _form(tensors[name]) != _form(expected[name])
    ]
    if differences:
        more = f", and {len(differences) - 8} more" if len(differences) > 8 else ""
        message = f"{what} does not fit the model: {', '.join(differences[:8])}{more}"
        raise IntegrityError(message, "use the spec and the version of specc of the run")


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _files(snapshot: Snapshot) -> Iterator[tuple[str, list[bytes]]]:
    weights: Literal["model.safetensors", "ema.safetensors"] = MODEL if snapshot.average is None else AVERAGE
    state = _state(snapshot.step, snapshot.seconds, weights, snapshot.spec_digest, snapshot.loader, snapshot.done)
    groups = {MODEL: snapshot.weights, OPTIMIZER: snapshot.optimizer, RNG: snapshot.rng}
    if snapshot.average is not None:
        groups[AVERAGE] = snapshot.average
    for name, tensors in groups.items():
        copies = {key: tensors[key].detach().cpu().contiguous() for key in sorted(tensors)}
        yield name, [tensor_bytes(copies)]
    yield STATE, [state]


def _state(
    step: int,
    seconds: float,
    weights: Literal["model.safetensors", "ema.safetensors"],
    spec_digest: str,
    loader: Mapping[str, int],
    done: float,
) -> bytes:
    state = State(
        step=step,
        seconds=seconds,
        weights=weights,
        spec_digest=spec_digest,
        threads=torch.get_num_threads(),
        versions={"python": platform.python_version(), "torch": str(torch.__version__)},
        loader=dict(loader),
        done=done,
    )
    return state.model_dump_json(indent=1).encode()


def _tensors(files: Committed, name: str) -> dict[str, Tensor]:
    try:
        return parse_tensors(files.read(name))
    except (SafetensorError, ValueError, KeyError) as error:
        raise IntegrityError(f"{files.path / name}: {error}", committed.HINT) from None


def _outdated(folder: Path, keep: int) -> list[Path]:
    steps = all_in(folder)
    complete = [path for path in steps if _is_complete(path)]
    return [path for path in steps if len(complete) >= keep and steps.index(path) < steps.index(complete[-keep])]


def _is_complete(path: Path) -> bool:
    try:
        return Committed.open(path).in_full_size()
    except IntegrityError:
        return False
