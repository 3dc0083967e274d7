"""The epilogue of a matrix product in generated code: unique tensor names, and expressions of these names."""

import keyword
from collections.abc import Collection, Mapping
from dataclasses import field
from functools import partial
from typing import Literal, NamedTuple

from specc.compiler.expr import PRIMITIVES, Expr, ExprError, Var, cuda_text, reread, substitute, triton_text, variables
from specc.compiler.ir.builder import underscored
from specc.compiler.ir.types import BYTES, TensorType
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.dropout import DRAW
from specc.compiler.ops.fp8 import MOST
from specc.compiler.ops.fp8 import STORAGE as STATE
from specc.compiler.ops.fp8_codes import FORMATS, CodesLinear
from specc.compiler.ops.linear import Product
from specc.compiler.records import record

VECTOR = 16  # in bytes; row sizes must be multiples of this number for vector loads, TMA and CUTLASS
FLOATS = ("bf16", "f16", "f32")

# Identifiers of the generated code, and C++ keywords. Python's keywords come from `keyword`.
OURS = """
    M N K NODE NAMESPACE BLOCK_M BLOCK_N BLOCK_K GROUP WARPS STAGES PROGRAMS Path Tensor
    TensorDescriptor tl torch triton ctypes functools library native kernel finish halves launch m n
    k i tile tiles tiles_m tiles_n first height rows columns ks at inside name shape dtype tensor
    have found wants range min max code programs workspace stream status arguments tree hardware
    gemm cute cutlass collective fusion stride_x stride_w stride_y Auto Element Row Tile Cluster
    Kernel Gemm Tree Epilogue Fragment Compute Part Aux Stored TileLoad TileStore ColumnLoad Raster
    Functor kRound z t tail swizzle raster call given high s logf sqrtf fabsf tanhf fminf fmaxf powf
"""
CPP = """
    alignas alignof auto bool break case catch char class const constexpr continue default delete do
    double else enum explicit export extern false float for friend goto if inline int long mutable
    namespace new noexcept operator private protected public register return short signed sizeof static
    struct switch template this throw true try typedef typename union unsigned using virtual void
    volatile while
"""
HELPERS = [name for primitive in PRIMITIVES.values() for name in primitive.cuda_helpers]
RESERVED = frozenset((*keyword.kwlist, *OURS.split(), *CPP.split(), *HELPERS))


@record
class Value:
    """A tensor that a kernel reads or writes, and its name in the generated code."""

    name: str
    type: TensorType

    def __str__(self) -> str:
        return f"{self.name} {self.type}"

    @property
    def column(self) -> bool:
        """Whether the tensor is a vector [N]."""
        return len(self.type.shape) == 1 and not self.buffer

    @property
    def buffer(self) -> bool:
        """Whether the tensor is a small buffer that every element of the result reads: the random key of a dropout
        mask, or the scales of 8-bit values."""
        return self.type == DRAW or self.type.storage == STATE

    @property
    def tile(self) -> bool:
        """Whether the tensor has the rows and columns of the result, [rows, N]."""
        return not self.column and not self.buffer


class Rounding(NamedTuple):
    """The rounding of an output to 8 bits.

    The value is first rounded to the dtype `dtype`, then divided by the scale in column `factor` of the tensor `state`.
    """

    state: str
    factor: int
    dtype: str

    @property
    def most(self) -> float:
        """The largest number of the 8-bit format."""
        return MOST[self.factor]


class Result(NamedTuple):
    """An output of a kernel, and the expression of named tensors that computes the output. `rounding` is set for 8-bit
    outputs."""

    value: Value
    expr: Expr
    rounding: Rounding | None = None


@record
class Epilogue:
    """All inputs and outputs of a kernel. The kernel multiplies the rows `x` [rows, K] with one or more weights.

    Attributes:
        x: The input of all products.
        weights: The weights, one per product.
        accumulators: The names of the products, which the kernel sums in f32.
        operands: The other tensors that the epilogue reads.
        results: The outputs, in the order of the node's outputs.
        n, k: The extents N and K of a weight.
        layout: `nk` for weights [N, K], `kn` for weights [K, N].
        draws: The name of each dropout mask, and the probability that an element is 0. The operand of the same name
            holds the random numbers.
        scales: The name of each variable that is a product of two scales, and the columns of the two scales. The
            operand of the same name holds all scales.
        steps: The outputs in the order of computation. The first output is computed last, because its expression may
            read the other outputs.
    """

    x: Value
    weights: tuple[Value, ...]
    accumulators: tuple[str, ...]
    operands: tuple[Value, ...]
    results: tuple[Result, ...]
    n: int
    k: int
    layout: Literal["nk", "kn"]
    draws: Mapping[str, float] = field(default_factory=dict)
    scales: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def steps(self) -> tuple[Result, ...]:
        return (*self.results[1:], self.results[0])

    @property
    def changed(self) -> tuple[str, ...]:
        """The names of state tensors in which the kernel records the largest magnitudes of rounded values."""
        return tuple(dict.fromkeys(result.rounding.state for result in self.results if result.rounding is not None))

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x, *self.weights, *self.operands)

    @property
    def outputs(self) -> tuple[Value, ...]:
        return tuple(result.value for result in self.results)

    @property
    def formulas(self) -> tuple[str, ...]:
        """The formulas of the accumulators, the dropout masks, the products of scales and the outputs, one per line,
        such as `p = x w^T`."""
        lines = [f"{p} = {self.product(w)}" for p, w in zip(self.accumulators, self.weights, strict=True)]
        lines += [f"{name} = 0 with probability {p}, else 1" for name, p in self.draws.items()]
        lines += [f"{name} = scale {i} times scale {j} of the state" for name, (i, j) in self.scales.items()]
        for step in self.steps:
            lines.append(f"{step.value.name} = {step.expr}")
            if (rounding := step.rounding) is not None:
                lines[-1] += (
                    f", rounded to {rounding.dtype}, then divided by scale {rounding.factor} of {rounding.state}"
                )
        return tuple(lines)

    def product(self, weight: Value) -> str:
        return f"{self.x.name} {weight.name}{'^T' if self.layout == 'nk' else ''}"


def epilogue_of(site: Site) -> Epilogue:
    """Returns the epilogue of a site for which `refusal` is None."""
    op, epilogue = site.node.op, site.epilogue
    assert isinstance(op, Product) and epilogue is not None
    count = op.arity - 1
    heads, operands = epilogue.variables[:count], site.operands
    # A [K, N] weight is the stored weight of a linear layer. The product is the gradient of the layer's input.
    x, y = {"nk": ("x", "y"), "kn": ("dy", "dx")}[op.layout]
    taken = {x}
    pick = partial(underscored, taken=taken, reserved=RESERVED)
    suffixes = [""] if count == 1 else [f"_{head}" for head in heads]
    weights = tuple(pick(f"w{suffix}") for suffix in suffixes)
    accumulators = tuple(pick(f"p{suffix}") for suffix in suffixes)
    named = {variable: pick(variable) for variable, _ in operands}
    labels = (*epilogue.labels, *[""] * len(epilogue.outputs))[: len(epilogue.outputs)]
    outputs = [pick(label or (f"{y}{i}" if i else y)) for i, label in enumerate(labels)]

    # If a variable and a label have the same name, the variable gets the name.
    renamed = {label: Var(name) for label, name in zip(labels, outputs, strict=True) if label}
    renamed |= {head: Var(name) for head, name in zip(heads, accumulators, strict=True)}
    renamed |= {variable: Var(name) for variable, name in named.items()}
    roundings = {i: Rounding(named[state], factor, dtype) for i, state, factor, dtype in epilogue.codes}
    results = tuple(
        Result(Value(name, type), substitute(reread(text), renamed), roundings.get(i))
        for i, (name, type, text) in enumerate(zip(outputs, site.node.types, epilogue.outputs, strict=True))
    )
    return Epilogue(
        Value(x, site.inputs[0]),
        tuple(map(Value, weights, site.inputs[1 : op.arity])),
        accumulators,
        tuple(Value(named[variable], type) for variable, type in operands),
        results,
        *op.extent(site.inputs[1]),
        op.layout,
        {named[name]: p for name, p in epilogue.draws},
        {named[name]: (i, j) for name, i, j in epilogue.scales},
    )


def refusal(site: Site) -> str | None:
    """Returns a reason why no kernel with an epilogue accepts the node. Returns None if some kernel may accept the
    node."""
    op, epilogue = site.node.op, site.epilogue
    if not isinstance(op, Product):
        return f"computes products of rows and weights; {site.node.op.name} is not such a product"
    if epilogue is None:
        return "computes products with an epilogue; for a plain product, cuBLAS is faster"
    x, weights = site.inputs[0], site.inputs[1 : op.arity]
    coded = isinstance(op, CodesLinear)
    if x.dtype not in (FORMATS if coded else ("bf16", "f16")):
        return f"multiplies bf16 or f16; the input is {x.dtype}"
    if odd := next((weight for weight in weights if weight.dtype != x.dtype and not coded), None):
        return f"multiplies two operands of the same dtype; the input is {x.dtype} and the weight {odd.dtype}"
    n, k = op.extent(weights[0])
    # An output in 8-bit floats is also accepted
    narrow = min((*site.node.types, x), key=lambda type: BYTES[type.dtype]).dtype
    for dim, extent, dtype in (("K", k, x.dtype), ("N", n, narrow)):
        size = extent * BYTES[dtype]
        if size % VECTOR:
            step = VECTOR // BYTES[dtype]
            down = extent // step * step
            near = f"{down} or {down + step}" if down else f"{step}"
            size_text = f"{dim} = {extent} {dtype} is {size} bytes, {near} would do"
            return f"needs rows of a multiple of {VECTOR} bytes; {size_text}"
    return _operands_refusal(site, n) or _results_refusal(site)


def _operands_refusal(site: Site, n: int) -> str | None:
    whole = site.node.type.shape
    for variable, type in site.operands:
        if type == DRAW or type.storage == STATE:
            continue
        if type.shape not in (whole, (n,)):
            wants = f"[{','.join(map(str, whole))}] or [{n}]"
            return f"reads operands of {wants}; {variable} is {type}"
        if type.dtype not in FLOATS:
            return f"reads operands in {', '.join(FLOATS)}; {variable} is {type.dtype}"
    return None


def _results_refusal(site: Site) -> str | None:
    epilogue = epilogue_of(site)
    for i, (type, result) in enumerate(zip(site.node.types, epilogue.results, strict=True)):
        if type.dtype not in FLOATS and result.rounding is None:
            return f"writes {', '.join(FLOATS)}; output {i} is {type.dtype}"
    read = {name for result in epilogue.results for name in variables(result.expr)} | {*epilogue.changed}
    if idle := [value.name for value in epilogue.operands if value.name not in read]:
        return f"reads only operands that its outputs need; no output reads {idle[0]}"
    full = {*epilogue.accumulators, *(value.name for value in epilogue.operands if not value.column)}
    for step in epilogue.steps:
        if not _meets(step.expr, full):
            return f"writes tiles of [rows, {site.node.type.width}]; {step.value.name} is the same in every row"
        full.add(step.value.name)
        try:
            triton_text(step.expr), cuda_text(step.expr)
        except ExprError as error:
            return f"cannot print {step.value.name}: {error.message}"
    return None


def _meets(expr: Expr, names: Collection[str]) -> bool:
    return any(name in names for name in variables(expr))
