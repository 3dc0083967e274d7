"""From a spec to a module: renders with the compiler that is installed, imports what it rendered, fills the
parameters."""

import hashlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from specc.compiler.build import DEPLOYED, compile_loaded
from specc.compiler.generated_folder import write
from specc.compiler.plan.lock import NO_LOCK, Lock
from specc.compiler.programs.programs import Group, Programs, group_functions
from specc.compiler.render.function import applied
from specc.compiler.spec.spec import Spec
from specc.compiler.targets import TARGETS, Target
from specc.runtime.errors import EnvironmentFailure, RunFailure, RuntimeFailure

if TYPE_CHECKING:
    import torch
    from torch import nn


class TargetError(RuntimeFailure):
    """A target that the spec does not list, or a device that no target's code runs on."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Loaded:
    """A module with the spec, target and programs it was generated from; `directory` holds its code."""

    spec: Spec
    target: Target
    programs: Programs
    model: "nn.Module"
    directory: Path


def instantiate(
    spec: Spec, target: str, directory: Path, fuse: bool = True, lock: Lock = NO_LOCK, deployed: bool = False
) -> Loaded:
    """Renders `spec` for `target` under `directory`, with the tiles of `lock`, and builds its module; parameters are
    f32 and not yet filled.

    Without `fuse` every fusion point is left out, which gives the same function by plain ops. With `deployed` it is
    what runs from an artifact, of a spec for which that is something else.
    """
    spec = spec if fuse else replace_fuse(spec)
    built = compile_loaded(spec, None, (target,), lock)
    write(directory, built.files, force=True)
    code = directory / target / DEPLOYED if deployed else directory / target
    plan = built.deployed[target] if deployed else built.plans[target]
    return Loaded(spec, TARGETS[target], plan.programs, import_model(code).Model(), code)


def replace_fuse(spec: Spec) -> Spec:
    """The spec with no fusion points."""
    return spec.model_copy(update={"fuse": ()})


def import_model(directory: Path) -> ModuleType:
    """Imports `model.py` of a generated folder. Raises RunFailure where there is none."""
    # Each weight is a parameter of its own, and cuDNN copies those of an LSTM together at every call: a megabyte or so.
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
    return import_file(directory, "model")


def import_file(directory: Path, name: str) -> ModuleType:
    """Imports a Python file of a generated folder as part of a package of its own, so that two builds never share a
    module.

    Raises RunFailure where there is no such file.
    """
    if not (directory / f"{name}.py").is_file():
        raise RunFailure(f"{directory} holds no {name}.py", "build the spec first: specc build")
    content = hashlib.sha256(str(directory.resolve()).encode())
    for path in sorted([*directory.glob("*.py"), *directory.glob("*.cu")]):
        content.update(path.name.encode() + path.read_bytes())
    package = f"specc_generated_{content.hexdigest()[:16]}"
    if f"{package}.{name}" in sys.modules:
        return sys.modules[f"{package}.{name}"]
    holder = ModuleType(package)
    holder.__path__ = [str(directory.resolve())]
    sys.modules[package] = holder
    spec = importlib.util.spec_from_file_location(f"{package}.{name}", directory / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"{package}.{name}"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for known in [known for known in sys.modules if known == package or known.startswith(f"{package}.")]:
            del sys.modules[known]
        raise
    return module


def initialize(loaded: Loaded, seed: int) -> None:
    """Fills every parameter in f32 as its `init` says, from a generator of its own that depends on seed and name."""
    from specc.runtime.model.parameters import fill

    fill(loaded.model, initial_values(loaded.programs), seed)


def initial_values(programs: Programs) -> dict[str, tuple[str, float]]:
    """The distribution of each parameter before training and its number, by name."""
    return {param.name: param.init.numbers(param.shape, programs.layers) for param in programs.params}


class Targeted(Protocol):
    """A spec, or what else has a name and targets."""

    @property
    def name(self) -> str: ...
    @property
    def targets(self) -> tuple[str, ...]: ...


def choose_target(spec: Targeted, wanted: str | None) -> str:
    """The target to run on: `wanted`, else the best of the spec's that this machine can run.

    Raises TargetError for one that the spec does not list, RunFailure where none of its targets runs here.
    """
    import torch

    if wanted is not None:
        if wanted not in spec.targets:
            raise TargetError(f"{spec.name} is not built for {wanted}", f"its targets are {', '.join(spec.targets)}")
        return wanted
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        here = major * 10 + minor
        fitting = [name for name in spec.targets if TARGETS[name].arch and runs_on(TARGETS[name], here)]
        if fitting:
            return max(fitting, key=lambda name: TARGETS[name].arch)
    if "cpu" in spec.targets:
        return "cpu"
    raise RunFailure(
        f"no target of {spec.name} runs on this machine", f"add cpu to its targets ({', '.join(spec.targets)})"
    )


def runs_on(target: Target, capability: int) -> bool:
    """Whether a GPU of this capability runs the target's code: sm80 code runs on all later ones, sm90a only on its
    own."""
    return target.arch == capability or (
        "wgmma" not in target.features and "tcgen05" not in target.features and target.arch < capability
    )


def device_of(target: Target) -> str:
    """The device that a target's code runs on."""
    return "cuda" if target.arch else "cpu"


def device_asked_for(target: Target, wanted: str | None) -> "torch.device":
    """The device to run a target's code on: the one asked for, else its own.

    Raises TargetError for what is no CPU and no NVIDIA GPU, EnvironmentFailure for a GPU that is not there.
    """
    import torch

    try:
        device = torch.device(wanted or device_of(target))
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise TargetError(f"no model runs on a device {wanted}", "name cpu, cuda, or one GPU of several as cuda:1")
    if device.type == "cuda" and not torch.cuda.is_available():
        if wanted is None:
            message = f"target {target.name} needs an NVIDIA GPU, and torch finds none"
            raise EnvironmentFailure(message, "name another target of the spec")
        raise EnvironmentFailure(f"device {wanted} is an NVIDIA GPU, and torch finds none", "leave the device out")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise EnvironmentFailure(f"there is no device {wanted}: torch finds {count}", "GPUs are counted from 0")
    return device


def group_function(module: ModuleType, programs: Programs, group: Group) -> Callable[..., Any]:
    """The function of the values that `group` reads, in the order of its inputs, as the generated `module` computes
    it: by a function of its own, or by the autograd function of the group."""
    name = group_functions(programs)[group.name]
    if name in vars(module):
        own: Callable[..., Any] = vars(module)[name]
        return own
    names = [f"x{i}" for i in range(len(group.forward.inputs))]
    text = applied(group, name, names)
    applies: Callable[..., Any] = eval(f"lambda {', '.join(names)}: {text}", dict(vars(module)))
    return applies
