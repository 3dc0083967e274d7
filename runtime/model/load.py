"""Creates a module from a spec: generates the code, imports the code, and fills the parameters with initial values."""

import importlib.util
import linecache
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import FileFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from specc.compiler.build import DEPLOYED, compiled
from specc.compiler.generated_folder import write
from specc.compiler.ops import fp8
from specc.compiler.ops.dropout import DRAW, begin_draw
from specc.compiler.plan.lock import NO_LOCK, Lock
from specc.compiler.programs.programs import Group, Programs, group_functions
from specc.compiler.quant.scheme import Array
from specc.compiler.render.function import applied
from specc.compiler.spec.spec import Spec
from specc.compiler.targets import TARGETS, Target
from specc.runtime.errors import EnvironmentFailure, RunFailure, RuntimeFailure
from specc.runtime.model.code_cache import GENERATED, cached_code, content_digest, use_private_caches

if TYPE_CHECKING:
    import torch
    from torch import nn


class TargetError(RuntimeFailure):
    """Raised if the spec does not list the requested target, or if a device is not a CPU or an NVIDIA GPU."""

    code = "U004"
    exit_code = 2


@dataclass(frozen=True, slots=True)
class Loaded:
    """A generated module, with its spec, target and programs.

    `directory` contains the generated code. `stored` contains the quantized arrays of each parameter, by parameter name
    and array name. If the model is not quantized, `stored` is None.
    """

    spec: Spec
    target: Target
    programs: Programs
    model: "nn.Module"
    directory: Path
    stored: Mapping[str, Mapping[str, Array]] | None = None

    @property
    def deployed(self) -> bool:
        """Whether the module computes matrix products from the stored integer codes of an artifact."""
        return self.directory.name == DEPLOYED


def instantiate(
    spec: Spec, target: str, directory: Path, fuse: bool = True, lock: Lock = NO_LOCK, deployed: bool = False
) -> Loaded:
    """Generates the code of `spec` and creates its module. The f32 parameters of the module are not initialized.

    Args:
        spec: the spec.
        target: the target for which the code is generated.
        directory: the folder to which the code is written.
        fuse: whether to generate fused kernels for the fusion points of the spec. The unfused code computes the same
            function.
        lock: the kernels that `specc tune` measured as the fastest.
        deployed: whether to generate a module that computes matrix products from the int8 codes of an artifact.
            Requires a spec with int8 products.

    Returns:
        The module with its spec, target, programs and code folder.

    Raises:
        IntegrityError: if the target is a GPU target, and other users can write to the cache of generated code.
    """
    if TARGETS[target].arch:  # only the code for GPUs is compiled, and therefore cached
        use_private_caches()
    spec = spec if fuse else spec.plain
    built = compiled(spec, (target,), lock)
    write(directory, built.files, force=True)
    code = directory / target / DEPLOYED if deployed else directory / target
    if TARGETS[target].arch:
        code = cached_code(code)
    plan = built.deployed[target] if deployed else built.plans[target]
    model = import_model(code).Model()
    for name, type in plan.programs.buffers:
        if type.storage == fp8.STORAGE:
            fp8.begin_scales(model.get_buffer(name))
        elif type == DRAW:
            begin_draw(model.get_buffer(name), spec.model.window)
    return Loaded(spec, TARGETS[target], plan.programs, model, code)


def sharing(loaded: Loaded, files: Mapping[str, str], directory: Path) -> "nn.Module":
    """Creates a module for additional programs of a loaded model. The two modules share their parameters.

    Args:
        loaded: the model.
        files: the generated code of the additional programs, by file name.
        directory: the folder to which the files are written.

    Returns:
        The module, in eval mode. Its parameters are the tensors of the loaded model.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    model: nn.Module = import_model(directory).Model()
    weights = dict(loaded.model.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].data
    return model.eval()


class _WithoutBytecode(SourceFileLoader):
    """A loader that neither reads nor writes bytecode files, which a full disk leaves incomplete."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def import_model(directory: Path) -> ModuleType:
    """Imports `model.py` of a generated folder. Raises RunFailure if the file does not exist."""
    # cuDNN copies the weights of an LSTM, which are separate parameters, into one chunk of a megabyte at every call.
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
    return import_file(directory, "model")


def import_file(directory: Path, name: str) -> ModuleType:
    """Imports a Python file of a generated folder.

    The names of the imported package and of its custom ops contain a digest of the content of the folder. The cache
    keys of torch.compile contain these names, so runs with equal code share cache entries. Raises RunFailure if the
    file does not exist.
    """
    if not (directory / f"{name}.py").is_file():
        raise RunFailure(f"{directory} has no {name}.py", "build the spec first: specc build")
    package = f"{GENERATED}{content_digest(directory)[:16]}"
    if f"{package}.{name}" in sys.modules:
        return sys.modules[f"{package}.{name}"]
    holder = sys.modules.setdefault(package, ModuleType(package))
    folder = str(directory.resolve())
    holder.__path__ = [folder]  # an earlier import may have set the path of a folder that was since deleted
    finder = sys.path_importer_cache[folder] = FileFinder(folder, (_WithoutBytecode, [".py"]))
    spec = finder.find_spec(f"{package}.{name}")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"{package}.{name}"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for known in [known for known in sys.modules if known == package or known.startswith(f"{package}.")]:
            del sys.modules[known]
        raise
    _keep_sources(package)
    return module


def _keep_sources(package: str) -> None:
    # Tracebacks read source lines, but the files may be deleted while the package is in use.
    for name, module in list(sys.modules.items()):
        file = module.__file__ if name.startswith(f"{package}.") else None
        if file is not None and Path(file).is_file():  # the lines of a deleted file were stored at its import
            text = Path(file).read_text()
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


def initialize(loaded: Loaded, seed: int) -> None:
    """Fills every f32 parameter with initial values.

    The random numbers of a parameter depend only on `seed` and the name of the parameter.
    """
    from specc.runtime.model.parameters import fill

    fill(loaded.model, initial_values(loaded.programs), seed)


def initial_values(programs: Programs) -> dict[str, tuple[str, float]]:
    """Returns the initial distribution of each parameter, by the name of the parameter.

    A distribution is a pair of its name and its parameter, such as the standard deviation of a normal distribution.
    """
    return {param.name: param.init.numbers(param.shape) for param in programs.params}


class Targeted(Protocol):
    """A spec, or another object with a name and targets."""

    @property
    def name(self) -> str: ...
    @property
    def targets(self) -> tuple[str, ...]: ...


def choose_target(spec: Targeted, target: str | None) -> str:
    """Returns `target`. If `target` is None, returns the best target of the spec that this machine can run.

    Raises TargetError if the spec does not list `target`. Raises RunFailure if this machine can run none of the targets
    of the spec.
    """
    if target is not None:
        if target not in spec.targets:
            raise TargetError(
                f"{spec.name} does not list the target {target}", f"the targets are {', '.join(spec.targets)}"
            )
        return target
    fitting = [name for name in spec.targets if unavailable(TARGETS[name]) is None]
    if not fitting:
        message = f"no target of {spec.name} runs on this machine"
        raise RunFailure(message, f"the targets are {', '.join(spec.targets)}; add cpu to run without such a GPU")
    return max(fitting, key=lambda name: TARGETS[name].arch)


def unavailable(target: Target) -> str | None:
    """Returns the reason why this machine cannot run code for a target, such as "needs a GPU of ...".

    Returns None if the machine can run the code.
    """
    import torch

    if not target.arch:
        return None
    if not torch.cuda.is_available():
        return f"needs a GPU of {target.title}, and torch finds none"
    major, minor = torch.cuda.get_device_capability()
    return None if runs_on(target, major * 10 + minor) else f"needs {target.title}; this GPU is sm{major}{minor}"


def runs_on(target: Target, capability: int) -> bool:
    """Returns whether a GPU with the compute capability `capability`, such as 90, can run code for a target.

    Code for a target such as sm80 also runs on later GPUs. Code with wgmma or tcgen05 instructions runs only on GPUs
    with the compute capability of the target.
    """
    return target.arch == capability or (
        "wgmma" not in target.features and "tcgen05" not in target.features and target.arch < capability
    )


def device_of(target: Target) -> str:
    """Returns the type of device that runs code for a target: `cuda` or `cpu`."""
    return "cuda" if target.arch else "cpu"


def device_asked_for(target: Target, name: str | None) -> "torch.device":
    """Returns the device `name`, or the device of the target if `name` is None.

    Raises TargetError if the device is neither a CPU nor an NVIDIA GPU. Raises EnvironmentFailure if this machine has
    no such GPU.
    """
    import torch

    try:
        device = torch.device(name or device_of(target))
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise TargetError(f"device {name} is not supported", "choose cpu, cuda, or a GPU by its number, such as cuda:1")
    if device.type == "cuda" and not torch.cuda.is_available():
        if name is None:
            message = f"target {target.name} needs an NVIDIA GPU, and torch finds none"
            raise EnvironmentFailure(message, "name another target of the spec")
        raise EnvironmentFailure(f"device {name} needs an NVIDIA GPU, and torch finds none", "choose cpu")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise EnvironmentFailure(f"device {name} does not exist: torch finds {count}", "numbers of GPUs start at 0")
    return device


def group_function(module: ModuleType, programs: Programs, group: Group) -> Callable[..., Any]:
    """Returns the generated function of a fused group of nodes. The function takes the inputs of the group in order."""
    name = group_functions(programs)[group.name]
    if name in vars(module):
        function: Callable[..., Any] = vars(module)[name]
        return function
    names = [f"x{i}" for i in range(len(group.forward.inputs))]
    text = applied(group, name, names)
    applies: Callable[..., Any] = eval(f"lambda {', '.join(names)}: {text}", dict(vars(module)))
    return applies
