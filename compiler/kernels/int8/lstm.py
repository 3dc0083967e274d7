"""One time step of an int8 LSTM: the code that all kernels share, and a plain Torch kernel for any CPU."""

from typing import ClassVar, NamedTuple

from specc.compiler.ir.types import DTYPES
from specc.compiler.kernels.epilogue import FLOATS
from specc.compiler.kernels.int8.gemm import nodes_of, short_label
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, symbol, unless_cpu
from specc.compiler.kernels.lines import HEADER, flowed, unbroken
from specc.compiler.ops.int8_lstm import Int8LstmStep
from specc.compiler.ops.quantized import FINE, LARGEST


class StepFunction(NamedTuple):
    """The template context of the Python function for one time step. Code fields hold whole lines.

    Attributes:
        nodes: The paths of all nodes that call the function, as the text of a tuple. Error messages print these paths.
        size: The hidden size H.
        k: H padded, which is the reduction dim K of the product with h.
        dtype: The dtype of h and c.
        fine: If h is the sum of two codes, the step size of the first code divided by the step size of the second code.
            None if h is a single code.
        largest: The largest code.
    """

    header: str
    label: str
    nodes: str
    namespace: str
    function: str
    symbol: str
    size: int
    k: int
    promise: str
    dtype: str
    fine: int | None
    largest: int = LARGEST


def step_function(site: Site) -> StepFunction:
    function, file = symbol(site)
    h, _, x, weight, *_ = site.inputs
    size, k = extent(site)
    label = short_label(site.label)
    header = flowed(f"{unbroken(label)}    h, c {h}, x {x}, w {weight} -> {h}, {h}", "# ", "    ", HEADER)
    state = f"[..., {size}] {h.dtype}"
    shapes = [f"h, c {state}", f"x [..., {4 * size}] f32", f"w [{4 * size}, {k}] i8", f"offset [{4 * size}] i32"]
    shapes += [f"scale [{4 * size}] f32", f"inverse [{size}] f32"]
    promise = flowed(f'"""{", ".join(map(unbroken, shapes))} -> the next h and c {unbroken(state)}.', "    ")
    nodes = nodes_of(site.label)
    namespace = f"specc_{site.module}"
    fine = FINE if _op(site).bits == 16 else None
    return StepFunction(header, label, nodes, namespace, function, file, size, k, promise, DTYPES[h.dtype], fine)


def extent(site: Site) -> tuple[int, int]:
    """Returns the hidden size H, and H padded. The padded size is the reduction dim K of the product with h."""
    op = _op(site)
    n, k = op.extent(site.inputs[op.stored])
    return n // 4, k


def _op(site: Site) -> Int8LstmStep:
    op = site.node.op
    assert isinstance(op, Int8LstmStep)
    return op


def step_refusal(site: Site) -> str | None:
    """Returns a reason why no kernel accepts the dtype of h and c. Returns None if some kernel may accept the dtype."""
    state = site.inputs[0]
    return None if state.dtype in FLOATS else f"keeps h and c in {', '.join(FLOATS)}; they are {state}"


class PlainStep(NamedTuple):
    """The context of templates/torch/int8_lstm_step.py.jinja. `narrow` states that h and c have fewer bits than f32."""

    op: StepFunction
    padding: int
    narrow: bool


class Int8LstmTorch(Kernel):
    """The product in exact integer arithmetic, and the gates in f32."""

    RANK: ClassVar[int] = 9

    def rejects(self, site: Site) -> str | None:
        unfused = unless_cpu(site, "would compute codes, product and gates in separate kernels")
        return unfused or step_refusal(site)

    def render(self, site: Site) -> Rendered:
        op = step_function(site)
        context = PlainStep(op, op.k - op.size, site.inputs[0].dtype != "f32")
        return Rendered(op.function, op.symbol, {f"{op.symbol}.py": ("torch/int8_lstm_step.py.jinja", context)}, "")


INT8_LSTM_TORCH = Int8LstmTorch("int8_lstm_torch", "torch", computes=Int8LstmStep)
