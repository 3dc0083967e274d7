"""Measures int8 matrix products for several numbers of rows. The baseline is `torch._int_mm` plus the epilogue.

Code that torch.compile generates computes the epilogue of the baseline. On a GPU, one CUDA graph replays all calls, so
that launch overhead is not timed. The operands stay in the L2 cache, as in a decoder.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from specc.compiler.expr import torch_text
from specc.compiler.ir.types import DTYPES
from specc.compiler.kernels.int8.gemm import Int8Epilogue, int8_epilogue
from specc.compiler.ops.quantized import LARGEST, Int8Linear
from specc.compiler.plan.plan import Choice, Plan
from specc.runtime.bench.environment import Setup
from specc.runtime.bench.kernels import wrong
from specc.runtime.bench.plain import executed
from specc.runtime.bench.timing import Call, Measured, alternate
from specc.runtime.bench.variants import as_trained
from specc.runtime.model.cuda_graph import captured
from specc.runtime.verify.random_inputs import int8_operands

ROWS = (
    1,
    16,
    32,
    128,
    768,
    4096,
    23040,
)  # the values of M: one line, decoding steps, and a whole batch of 768 lines of 30 tokens
CALLS = 20  # the number of calls in one CUDA graph
# A number of moved bytes that is so large that `alternate` does not clear the cache
IN_CACHE = 1 << 62
OURS, THEIRS = "generated", "int_mm"


@dataclass(frozen=True, slots=True)
class ProductRow:
    """The measurement of one product [M, K] x [N, K]^T with its epilogue, for each M.

    Attributes:
        name: the paths of the nodes.
        kernel: the name of the generated kernel.
        language: the language of the kernel.
        n: the number of output features, N.
        k: the number of input features, K.
        makes: the dtype of the output.
        times: for each M, the time of the generated kernel and the time of the library.
        refused: for each M that the library does not support, the error message of the library.
    """

    name: str
    kernel: str
    language: str
    n: int
    k: int
    makes: str
    times: Mapping[int, Mapping[str, Measured]]
    refused: Mapping[int, str]

    @property
    def ratio(self) -> Mapping[int, float | None]:
        """For each M, the time of the kernel divided by the time of the library. None if the library did not run."""
        return {m: x[OURS].ms / x[THEIRS].ms if THEIRS in x else None for m, x in self.times.items()}


def product_rows(
    setup: Setup, plan: Plan, module: ModuleType, ready: Callable[[Choice], object], at: str
) -> Iterator[ProductRow]:
    """Measures every int8 kernel whose path contains `at`, and yields one row for each.

    Args:
        setup: the setup of the benchmark.
        plan: the plan of the int8 programs of an artifact.
        module: the module model.py that was generated for the plan.
        ready: a function that waits until the selected kernel of a node is compiled.
        at: only kernels whose path contains this text are measured.

    Raises:
        RunFailure: if a kernel returns wrong values.
    """
    shared: dict[str, list[Choice]] = {}
    for choice in plan.choices:
        if isinstance(choice.site.node.op, Int8Linear):
            shared.setdefault(choice.rendered.module, []).append(choice)
    for kernel, (choice, *others) in shared.items():
        labels = dict.fromkeys(label for each in (choice, *others) for label in each.site.label.split(" and "))
        if any(at in label for label in labels):
            setup.say(f"int8 {kernel}")
            ready(choice)
            name = next(iter(labels)) + (f" and {len(labels) - 1} more" if len(labels) > 1 else "")
            with torch.no_grad():
                yield _row(name, choice, vars(module)[plan.called(choice)], setup.device)


def _row(name: str, choice: Choice, generated: Callable[..., Tensor], device: torch.device) -> ProductRow:
    site, module = choice.site, choice.rendered.module
    epilogue = int8_epilogue(site)
    torch.compiler.reset()
    plain = epilogue_of(epilogue)
    compiled = as_trained(plain, device)
    times: dict[int, Mapping[str, Measured]] = {}
    refused: dict[int, str] = {}
    for m in ROWS:
        x, w, *rest = operands = int8_operands(epilogue, m, device)
        calls: dict[str, Call] = {OURS: partial(generated, *operands)}
        try:
            sums = torch._int_mm(x, w.t())
        except RuntimeError as error:
            refused[m] = str(error).splitlines()[0]
            sums = (x.double() @ w.double().t()).to(torch.int32)
        else:
            calls[THEIRS] = partial(lambda x, w, *rest: compiled(torch._int_mm(x, w.t()), *rest), *operands)
        _require_right(f"{module} of {m} rows", generated(*operands), plain(sums, *rest))
        times[m] = _times(calls, device)
    makes = site.node.type.dtype
    return ProductRow(name, module, choice.kernel.language, epilogue.n, epilogue.k, makes, times, refused)


def epilogue_of(epilogue: Int8Epilogue) -> Callable[..., Tensor]:
    """Returns a Torch function that computes the epilogue of an int8 product. The arguments of the function are the
    sums of the product, i32 [M, N], the offset that is added to the sums, and the operands of the epilogue.
    """
    names = [value.name for value in epilogue.operands]
    lines = [f"def epilogue({', '.join(('sums', 'offset', *names))}):", "    p = (sums + offset).float()"]
    lines += [f"    {value.name} = {value.name}.float()" for value in epilogue.operands if value.type.dtype != "f32"]
    lines.append(f"    y = {torch_text(epilogue.expr)}")
    rounded = f".round().clamp(-{LARGEST}, {LARGEST})" if epilogue.codes else ""
    lines.append(f"    return y{rounded}.to({DTYPES[epilogue.y.type.dtype]})")
    return executed("\n".join(lines), "epilogue", {"torch": torch, "F": torch.nn.functional})


def _require_right(name: str, output: Tensor, expected: Tensor) -> None:
    tolerance = 1.0
    if expected.dtype != torch.int8:
        tolerance = (1e-4 if expected.dtype == torch.float32 else 1e-2) * max(1.0, float(expected.abs().max()))
    error = float((output.double() - expected.double()).abs().max())
    if not error <= tolerance:
        raise wrong(name, f"the largest error is {error:.3g}, but rounding explains at most {tolerance:g}")


def _times(calls: Mapping[str, Call], device: torch.device) -> Mapping[str, Measured]:
    if device.type != "cuda":
        return alternate(calls, device, IN_CACHE)
    graphs = {name: captured(partial(_repeat, call))[0] for name, call in calls.items()}
    times = alternate({name: graph.replay for name, graph in graphs.items()}, device, IN_CACHE)
    return {name: Measured(time.ms / CALLS, time.spread) for name, time in times.items()}


def _repeat(call: Call) -> None:
    for _ in range(CALLS):
        call()
