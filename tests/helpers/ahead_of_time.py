"""Compiles the Triton kernels of generated files for a GPU that this machine does not have, as their launchers do.

Within `gpu_of(target)`, generated functions take tensors of `on_gpu`, which have shapes, strides and addresses, and no
values. A launch compiles its kernel with the arguments, the alignments and the options of the call, and does not run
it. A function that reads a value on the host fails, as it would while a CUDA graph is captured.
"""

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.library import CustomOpDef
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from specc.compiler.build import model_files
from specc.compiler.ir.types import TensorType
from specc.compiler.kernels.kernel import Site
from specc.compiler.plan.plan import Plan
from specc.compiler.targets import Target
from specc.runtime.dtypes import DTYPES
from specc.runtime.model.load import import_file

MULTIPROCESSORS = {80: 108, 86: 82, 89: 128, 90: 132, 100: 148, 120: 170}  # of the largest GPU
THREADS, REGISTERS = 1024, 65536  # of a thread block
GRID = (2**31 - 1, 65535, 65535)  # the largest grid
SELDOM = {"join_kernel"}  # attention over a cache launches it if the last program would join too many bytes
USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)")
PRODUCT = re.compile(r"mul(?:\.ftz)?\.f32\s+(%\w+), (%\w+), (%\w+);")
OF_A_LANE = re.compile(r"shfl\.sync\.\w+\.b32\s+(%\w+), (%\w+),")
CONTRACTED = re.compile(r"fma\.rn(?:\.ftz)?\.f32\s+%\w+, (%\w+), (%\w+), (%\w+);")


class OnGpu(Tensor):
    """A tensor without values that looks as if it were on a GPU. Its memory begins at a multiple of 512 bytes."""

    is_cuda = True  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return int(self.storage_offset() * self.element_size())


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its name, what it was compiled for, and what the machine code needs."""

    kernel: str
    target: Target
    types: Mapping[str, Any]
    grid: tuple[int, ...]
    code: Any

    @property
    def words(self) -> str:
        """The kernel and its constants."""
        numbers = [f"{name}={value}" for name, value in self.types.items() if not isinstance(value, str)]
        options = self.code.metadata
        return f"{self.kernel}[{', '.join(numbers)}, {options.num_warps} warps, {options.num_stages} stages]"


def on_gpu(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a contiguous tensor for `gpu_of`."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(OnGpu)


def inputs_on_gpu(types: Sequence[TensorType], sizes: Mapping[str, int]) -> list[Tensor]:
    """Returns tensors for `gpu_of` of the types, whose symbolic dims have `sizes`."""
    return [on_gpu(type.extents(sizes), DTYPES[type.dtype]) for type in types]


@contextmanager
def gpu_of(target: Target) -> Iterator[list[Launch]]:
    """Generated functions compile their kernels for a target, and launch nothing. Yields the list of the launches."""
    launches: list[Launch] = []
    run, gpu = JITFunction.run, GPUTarget("cuda", target.arch, 32)
    machine = SimpleNamespace(
        get_current_device=lambda: -target.arch,  # Triton keeps the kernels of each device
        get_current_stream=lambda device: 0,
        get_current_target=lambda: gpu,
    )

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        code = run(self, *args, grid=grid, warmup=True, **options)
        names = [parameter.name for parameter in self.params]
        given = dict(zip(names, args, strict=False)) | {k: v for k, v in options.items() if k in names}
        types = {name: str(value.dtype) if isinstance(value, Tensor) else value for name, value in given.items()}
        dims = grid(given) if callable(grid) else grid
        launches.append(Launch(self.fn.__name__, target, types, tuple(dims), code))
        return code

    properties = SimpleNamespace(
        multi_processor_count=MULTIPROCESSORS[target.arch],
        major=target.arch // 10,
        minor=target.arch % 10,
        shared_memory_per_block_optin=target.shared_memory,
    )
    with ExitStack() as stack:
        for where, name, value in (
            (driver, "_active", machine),
            (JITFunction, "run", compiled),
            (CustomOpDef, "__call__", lambda self, *args, **words: self._init_fn(*args, **words)),
            (torch.cuda, "device_of", lambda tensor: nullcontext()),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "get_device_properties", lambda device=None: properties),
            (torch.cuda, "get_device_capability", lambda device=None: (properties.major, properties.minor)),
        ):
            stack.enter_context(patch.object(where, name, value))
        yield launches


def problems(launches: Sequence[Launch], folder: Path) -> list[str]:
    """Returns what a GPU would refuse, or what makes it slow: too large grids or blocks, shared memory beyond that of
    the target, registers in memory. cuobjdump, which comes with Triton, reads machine code from files in `folder`."""
    found = []
    usage = resources(launches, folder)
    for launch, (registers, stack) in zip(launches, usage, strict=True):
        data = launch.code.metadata
        threads = 32 * data.num_warps
        excess = [
            f"a grid of {launch.grid}" * any(not 0 < n <= most for n, most in zip(launch.grid, GRID, strict=False)),
            f"{threads} threads" * (threads > THREADS),
            f"{data.shared:,} bytes of shared memory" * (data.shared > launch.target.shared_memory),
            f"{registers} registers for {threads} threads" * (registers * threads > REGISTERS),
            f"{stack} bytes of registers in memory" * (stack > 0),
        ]
        found += [f"{launch.words} on {launch.target.name} has {text}" for text in excess if text]
    return found


def unequal_sums(code: Any) -> list[str]:
    """Returns the sums over lanes of products whose last bits differ between the lanes.

    If the product of the lane itself is contracted with the sum, it is not rounded, but that of the other lane is. If
    several threads then store the sum, the result depends on their order, which racecheck reports.
    """
    products: dict[str, set[str]] = {}
    lanes: dict[str, str] = {}
    unequal = []
    for line in code.asm["ptx"].splitlines():
        if product := PRODUCT.search(line):
            products[product[1]] = {product[2], product[3]}
        elif lane := OF_A_LANE.search(line):
            lanes[lane[1]] = lane[2]
        elif (added := CONTRACTED.search(line)) and products.get(lanes.get(added[3], "")) == {added[1], added[2]}:
            unequal.append(line.strip())
    return unequal


def resources(launches: Sequence[Launch], folder: Path) -> list[tuple[int, int]]:
    """Returns the registers of a thread of each launch, and the bytes that it has on the stack."""
    from triton import knobs

    tool, results = knobs.nvidia.cuobjdump.path, {}
    for launch in launches:
        code = launch.code
        if code.hash not in results:
            path = folder / f"{code.hash}.cubin"
            path.write_bytes(code.asm["cubin"])
            text = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
            usage = {name: (int(registers), int(stack)) for name, registers, stack in USAGE.findall(text)}
            results[code.hash] = usage[code.metadata.name]
    return [results[launch.code.hash] for launch in launches]


def jit_functions(module: ModuleType) -> set[str]:
    """Returns the names of the kernels of a generated file that its Python code launches."""
    source = Path(str(module.__file__)).read_text()
    names = {name for name, value in vars(module).items() if isinstance(value, JITFunction)}
    return {name for name in names if re.search(rf"\b{name}\[", source)}


def launch_site(site: Site, function: Any, sizes: Mapping[str, int]) -> None:
    """Calls the function of a generated file within `gpu_of`, with tensors of the types of its site."""
    function(*inputs_on_gpu(site.inputs, site.node.op.site_sizes(sizes)))


def compile_plan(plan: Plan, folder: Path, sizes: Sequence[Mapping[str, int]], only: str = "") -> list[Launch]:
    """Compiles every Triton kernel of a plan, for its target.

    Args:
        plan: the plan of a model.
        folder: an empty folder, for the generated files.
        sizes: the sizes of the symbolic dims of each call; `Op.site_sizes` makes them consistent.
        only: a pattern in the names of the modules to compile.

    Returns:
        The launches of the functions of all nodes with a kernel, for all sizes.

    Raises:
        AssertionError: if a call launches nothing, or a kernel that is not in SELDOM is launched by no call.
    """
    for name, text in model_files(plan).items():
        (folder / name).write_text(text)
    chosen = {choice.rendered.module: choice for choice in plan.choices if re.search(only, choice.rendered.module)}
    every: list[Launch] = []
    for name, choice in chosen.items():
        if choice.kernel.language != "triton" or not choice.rendered.function:
            continue
        module = import_file(folder, name)
        with gpu_of(plan.target) as launches:
            for each in sizes:
                launch_site(choice.site, getattr(module, choice.rendered.function), each)
        unused = jit_functions(module) - {launch.kernel for launch in launches} - SELDOM
        assert launches and not unused, f"{name} launches {len(launches)} kernels, and not {unused}"
        every += launches
    return every
