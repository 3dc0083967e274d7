"""Profiles a training step: classifies the kernels in a trace by name, and computes the idle time."""

import ast
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specc.compiler.plan.plan import Plan

# The first pattern that matches the name of a kernel determines its class. Exact names of Triton kernels of the plan
# are tried before these patterns. The patterns for Inductor come first, because names of Inductor's kernels contain the
# names of ops, such as attention. The class `recurrent` is the LSTM of the library without its matrix products.
CLASSES: tuple[tuple[str, str], ...] = (
    ("attention", r"^triton_tem_.*attention"),
    ("GEMM", r"^triton_(tem|mm)_"),
    ("optimizer", r"^triton_for_|multi_tensor_apply_kernel|FusedOptimizer"),
    ("pointwise", r"^triton_"),
    ("recurrent", r"(?i)lstm|(?<![a-z])rnn"),
    ("communication", r"nccl|all_reduce|all_gather|reduce_scatter|multimem"),
    ("attention", r"sdpa|fmha|flash|compute_dot_do_o|attention"),
    ("fused", r"cutlass13device_kernel|cutlass::device_kernel"),
    ("GEMM", r"nvjet|gemm|gemv|splitKreduce|cublas|cutlass"),
    ("copy", r"^Memcpy|^Memset"),
    ("pointwise", r"at::native|at::cuda|2at6native|cub::|elementwise|reduce_kernel|softmax"),
)
OTHER = "other"
ORDER = ("GEMM", "fused", "attention", "recurrent", "pointwise", "optimizer", "communication", "copy", OTHER)
# Kernels that are launched within these ranges belong to the optimizer, regardless of their names. The first range is
# the range of torch.optim. The second range is an update of the trainer, including the casts before and after the
# update. The class therefore includes the matrix products of Newton-Schulz iterations.
OPTIMIZER_RANGES = ("Optimizer.step#", "specc.optimizer")
# Matches the name of a CUDA C++ kernel in source code that follows the templates.
CUDA_KERNEL = re.compile(r"^__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(", re.MULTILINE)
# Matches the name of a CUDA C++ kernel of the plan in a trace. The names of Torch's kernels begin with at:: instead.
_GENERATED = re.compile(r"(?:void )?\(anonymous namespace\)::(\w+)[(<]")
DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCH = frozenset({"cuda_runtime", "cuda_driver"})


def classify(name: str, generated: frozenset[str] = frozenset()) -> str:
    """Returns the class of a kernel, such as `GEMM` or `attention`.

    `name` is the name of the kernel in a trace. `generated` has the names of the generated kernels of the plan, except
    CUTLASS kernels.
    """
    match = _GENERATED.match(name)
    if (match.group(1) if match else name) in generated:
        return "fused"
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name)), OTHER)


def generated_names(plan: Plan, directory: Path) -> frozenset[str]:
    """Returns the names that a trace shows for the generated kernels of a plan, except CUTLASS kernels.

    The names are the names of the functions with `@triton.jit` or `__global__` in the kernel files of `directory`.
    """
    names: set[str] = set()
    for file in sorted({name for choice in plan.choices for name in choice.rendered.files}):
        source = (directory / file).read_text(encoding="utf-8")
        names |= {*jitted(source)} if file.endswith(".py") else {*CUDA_KERNEL.findall(source)}
    return frozenset(names)


def jitted(source: str) -> Iterator[str]:
    """Yields the names of the functions in Python source that have the decorator `@triton.jit`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            marks = [mark.func if isinstance(mark, ast.Call) else mark for mark in node.decorator_list]
            if any(ast.unparse(mark) in ("triton.jit", "jit") for mark in marks):
                yield node.name


@dataclass(frozen=True, slots=True)
class Kernel:
    """All calls of one kernel in a profile. `kind` is the class of the kernel. `ms` is the time per step, and `calls`
    is the number of calls per step.
    """

    kind: str
    name: str
    ms: float
    calls: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The kernels of a training step, averaged over `steps` steps.

    `wall_ms` is the time per step from the start of the first kernel to the end of the last kernel. `idle_ms` is the
    part of `wall_ms` in which no kernel ran. If kernels run concurrently, the full time of each kernel counts.
    """

    steps: int
    wall_ms: float
    idle_ms: float
    kernels: tuple[Kernel, ...]

    @property
    def classes(self) -> Mapping[str, Mapping[str, float]]:
        kinds = {kind: [kernel for kernel in self.kernels if kernel.kind == kind] for kind in ORDER}
        totals = {k: {"ms": sum(x.ms for x in v), "calls": sum(x.calls for x in v)} for k, v in kinds.items()}
        return {kind: total for kind, total in totals.items() if total["ms"]}


def profile(advance: Callable[[], object], steps: int, generated: frozenset[str]) -> Profile:
    """Profiles `steps` training steps on the GPU. Each call of `advance` runs one step.

    `generated` has the names of the generated kernels. Raises RuntimeError if the profiler records no kernel.
    """
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            advance()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="specc-bench-") as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return read(events, steps, generated)


def read(events: Iterable[Mapping[str, Any]], steps: int, generated: frozenset[str]) -> Profile:
    """Computes a profile from the events of a Chrome trace of torch.profiler.

    The trace covers `steps` training steps. `generated` has the names of the generated kernels. Times in the trace are
    in microseconds. A correlation number links each kernel to the CPU call that launched the kernel. Raises
    RuntimeError if the trace contains no kernel.
    """
    device: list[Mapping[str, Any]] = []
    launched: dict[object, float] = {}
    ranges: list[tuple[float, float]] = []
    for event in events:
        kind = event.get("cat")
        if kind in DEVICE:
            device.append(event)
        elif kind in LAUNCH and (number := _correlation(event)) is not None:
            launched[number] = event["ts"]
        elif kind == "user_annotation" and event["name"].startswith(OPTIMIZER_RANGES):
            ranges.append((event["ts"], event["ts"] + event["dur"]))
    if not device:
        raise RuntimeError("the profiler recorded no kernel")
    durations: dict[tuple[str, str], list[float]] = defaultdict(list)
    spans = []
    for event in device:
        at = launched.get(_correlation(event))
        kind = classify(event["name"], generated)
        if at is not None and any(start <= at <= end for start, end in ranges):
            kind = "optimizer"
        durations[kind, event["name"]].append(event["dur"] / 1e3)
        spans.append((event["ts"], event["ts"] + event["dur"]))
    wall = (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e3
    kernels = [Kernel(kind, name, sum(ms) / steps, len(ms) / steps) for (kind, name), ms in durations.items()]
    kernels.sort(key=lambda kernel: (-kernel.ms, kernel.kind, kernel.name))
    return Profile(steps, wall / steps, (wall - covered(spans) / 1e3) / steps, tuple(kernels))


def _correlation(event: Mapping[str, Any]) -> object:
    return event.get("args", {}).get("correlation")


def covered(spans: Sequence[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
