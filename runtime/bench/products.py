"""Measures the int8 products of deployed programs beside `torch._int_mm` with the compiled epilogue, for several
numbers of rows.

On a GPU, calls are replayed as one CUDA graph, so that launches do not count. Operands stay in the cache, as they do
between the steps of a decoder.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from specc.compiler.expr import torch_text
from specc.compiler.kernels.generated import DTYPES as SPELT
from specc.compiler.kernels.int8.gemm import Int8Epilogue, int8_epilogue
from specc.compiler.ops.quantized import LARGEST, Int8Linear
from specc.compiler.plan.plan import Choice, Plan
from specc.runtime.bench.kernels import Ready
from specc.runtime.bench.plain import executed
from specc.runtime.bench.timing import Call, Measured, alternate
from specc.runtime.bench.variants import as_trained
from specc.runtime.errors import RunFailure
from specc.runtime.model.cuda_graph import captured
from specc.runtime.verify.random_inputs import int8_operands

ROWS = (1, 16, 32, 128, 768, 4096, 23040)  # M: one line, steps of decoders, whole batches of 768 lines of 30 tokens
CALLS = 20  # in one graph
IN_CACHE = 1 << 62  # bytes: so many that the clocks leave the operands in the cache
OURS, THEIRS = "generated", "int_mm"


@dataclass(frozen=True, slots=True)
class ProductRow:
    """One product [M, K] x [N, K]^T with its epilogue, for each M. `refused` is the reason why the library did not run,
    by M."""

    name: str
    kernel: str
    language: str
    n: int
    k: int
    makes: str
    times: Mapping[int, Mapping[str, Measured]]
    refused: Mapping[int, str] = field(default_factory=dict)

    def ratio(self, m: int) -> float | None:
        """Returns our time as a share of the library's, or None if the library did not run."""
        found = self.times[m]
        return found[OURS].ms / found[THEIRS].ms if THEIRS in found else None


def product_rows(
    plan: Plan, module: ModuleType, device: torch.device, ready: Ready, at: str, say: Callable[[str], None]
) -> Iterator[ProductRow]:
    """Yields a row for every int8 kernel of a deployed plan whose path contains `at`.

    Args:
        plan: the deployed plan.
        module: its generated model.py.
        device: the device to measure on.
        ready: waits until a choice's kernel can be called.
        at: the text that paths must contain.
        say: reports progress.

    Raises:
        RunFailure: if a kernel returns wrong values.
    """
    shared: dict[str, list[Choice]] = {}
    for choice in plan.choices:
        if isinstance(choice.site.node.op, Int8Linear):
            shared.setdefault(choice.rendered.module, []).append(choice)
    for kernel, choices in shared.items():
        labels = list(dict.fromkeys(label for choice in choices for label in choice.site.label.split(" and ")))
        if not any(at in label for label in labels):
            continue
        say(f"int8 {kernel}")
        ready(choices[0])
        name = f"{labels[0]} and {len(labels) - 1} more" if len(labels) > 1 else labels[0]
        with torch.no_grad():
            yield _row(name, choices[0], vars(module)[plan.called(choices[0])], device)


def _row(name: str, choice: Choice, own: Callable[..., Tensor], device: torch.device) -> ProductRow:
    site = choice.site
    epilogue = int8_epilogue(site)
    torch.compiler.reset()
    finish = as_trained(epilogue_of(epilogue), device)
    times: dict[int, Mapping[str, Measured]] = {}
    refused: dict[int, str] = {}
    for m in ROWS:
        x, w, offset, *rest = int8_operands(epilogue, m, device)
        calls: dict[str, Call] = {OURS: _bound(own, x, w, offset, *rest)}
        found = own(x, w, offset, *rest)
        try:
            torch._int_mm(x, w.t())
        except RuntimeError as error:
            refused[m] = str(error).splitlines()[0]
            sums = (x.double() @ w.double().t()).to(torch.int32)
        else:
            calls[THEIRS] = _bound(lambda x, w, *more: finish(torch._int_mm(x, w.t()), *more), x, w, offset, *rest)
            sums = torch._int_mm(x, w.t())
        _require_right(f"{choice.rendered.module} of {m} rows", found, epilogue_of(epilogue)(sums, offset, *rest))
        times[m] = _times(calls, device)
    made = site.node.type.dtype
    return ProductRow(
        name, choice.rendered.module, choice.kernel.language, epilogue.n, epilogue.k, made, times, refused
    )


def epilogue_of(epilogue: Int8Epilogue) -> Callable[..., Tensor]:
    """Returns the epilogue in plain Torch: a function of the sums, i32 [M, N], the offset and the operands."""
    names = [value.name for value in epilogue.operands]
    lines = [f"def epilogue({', '.join(('sums', 'offset', *names))}):", "    p = (sums + offset).float()"]
    lines += [f"    {value.name} = {value.name}.float()" for value in epilogue.operands if value.type.dtype != "f32"]
    lines.append(f"    y = {torch_text(epilogue.expr)}")
    rounded = f".round().clamp(-{LARGEST}, {LARGEST})" if epilogue.codes else ""
    lines.append(f"    return y{rounded}.to({SPELT[epilogue.y.type.dtype]})")
    return executed("\n".join(lines), "epilogue", {"torch": torch, "F": torch.nn.functional})


def _require_right(what: str, found: Tensor, want: Tensor) -> None:
    """Raises RunFailure if the values differ by more than rounding: an int8 code may be off by 1, where its value is
    about half-way between two codes; floats differ by rounding."""
    far = 1.0 if want.dtype == torch.int8 else 1e-2 if want.dtype != torch.float32 else 1e-4
    far *= max(1.0, float(want.abs().max())) if want.dtype != torch.int8 else 1.0
    error = float((found.double() - want.double()).abs().max())
    if not error <= far:
        raise RunFailure(
            f"{what} is wrong: {error:.3g} off at most, and {far:g} is rounding", "specc verify tells more"
        )


def _bound(call: Callable[..., Any], *given: Tensor) -> Call:
    return lambda: call(*given)


def _times(calls: Mapping[str, Call], device: torch.device) -> Mapping[str, Measured]:
    """Times the calls. On a GPU, as replays of a graph of `CALLS` calls."""
    if device.type != "cuda":
        return alternate(calls, device, IN_CACHE)
    graphs = {name: captured(partial(_repeat, call))[0] for name, call in calls.items()}
    times = alternate({name: graph.replay for name, graph in graphs.items()}, device, IN_CACHE)
    return {name: Measured(time.ms / CALLS, time.spread) for name, time in times.items()}


def _repeat(call: Call) -> None:
    for _ in range(CALLS):
        call()
