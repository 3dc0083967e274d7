"""The inputs, outputs and formulas of a linear layer with few input rows, as named in generated code."""

from itertools import chain
from typing import NamedTuple

from specc.compiler.expr import Var, reread, substitute
from specc.compiler.ir.builder import underscored
from specc.compiler.kernels.epilogue import RESERVED, Result, Value
from specc.compiler.kernels.generated import GeneratedFunction, generated_function, number_of
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.decoding.packed_codes import lanes_of
from specc.compiler.ops.decoding.row_linear import RowLinear
from specc.compiler.ops.norm import RmsNorm

WORDS = (
    "x gain early joined partial counts COUNTS PARTS cache last tiles heights product part stages warps rows_tile "
    "count parts slices sum width list expected ROW PDL LANES WIDTHS ROWS_K ROWS_WARPS"
)
LETTERS = ("w", "s", "p", "y", "first_p")
OURS = {*WORDS.split(), *(f"{letter}{i}" for letter in LETTERS for i in ("", *range(9)))}


class Parts(NamedTuple):
    """The inputs and outputs of a site, as named in generated code.

    Each output in `results` is an expression of the products (`p`, `p_up`, ...) and the operands. If `scales` is not
    empty, each weight consists of packed codes and one scale per row.
    """

    x: Value
    gain: tuple[Value, ...]
    weights: tuple[Value, ...]
    scales: tuple[Value, ...]
    products: tuple[str, ...]
    operands: tuple[Value, ...]
    results: tuple[Result, ...]
    norm: RmsNorm | None
    epilogue: bool

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x, *self.gain, *chain(*self.stored), *self.operands)

    @property
    def stored(self) -> tuple[tuple[Value, ...], ...]:
        """The tensors of each weight: the weight itself, or its codes and scales."""
        return tuple(zip(self.weights, *([self.scales] if self.scales else []), strict=True))

    @property
    def bits(self) -> tuple[str, ...]:
        """The names of the constants that hold the number of bits per code, one per packed weight."""
        return tuple(f"BITS{scale.name[1:]}" for scale in self.scales)

    @property
    def lanes(self) -> int:
        return lanes_of(self.k)

    @property
    def outputs(self) -> tuple[Value, ...]:
        return tuple(result.value for result in self.results)

    @property
    def widths(self) -> tuple[int, ...]:
        """The extents N of the kernel's parts. Weights with a common epilogue form one part. Otherwise, each weight is
        a part."""
        widths = tuple(number_of(weight.type.shape[0]) for weight in self.weights)
        return widths[:1] if self.epilogue else widths

    @property
    def k(self) -> int:
        return number_of(self.x.type.width)

    @property
    def formulas(self) -> tuple[str, ...]:
        h = "x" if self.norm is None else "norm(x)"
        norm = (
            (f"norm(x) = x / sqrt(mean(x ** 2) + {self.norm.eps}){' * gain' * self.norm.affine}",) if self.norm else ()
        )
        weights = [f"({s.name} {w.name})" for w, s in zip(self.weights, self.scales, strict=False)] or [
            w.name for w in self.weights
        ]
        products = (f"{p} = {h} {w}^T" for p, w in zip(self.products, weights, strict=True))
        results = (f"{result.value.name} = {result.expr}" for result in self.results)
        return (*norm, *products, *results)


def parts_of(site: Site) -> Parts:
    op, epilogue = site.node.op, site.epilogue
    assert isinstance(op, RowLinear)
    counted = [""] if op.weights == 1 else [str(i) for i in range(op.weights)]
    products = tuple(f"p{i}" for i in counted)
    weights = tuple(Value(f"w{i}", type) for i, type in zip(counted, op.each_weight(site.inputs), strict=True))
    types = site.inputs[op.first + 1 : op.arity : 2] if op.packed else ()
    scales = tuple(Value(f"s{i}", type) for i, type in zip(counted, types, strict=False))
    gain = tuple(Value("gain", type) for type in site.inputs[1 : op.first])
    operands: list[Value] = []
    if epilogue is None:
        outputs = [Value(f"y{i}", type) for i, type in zip(counted, site.node.types, strict=True)]
        results = tuple(Result(y, Var(p)) for y, p in zip(outputs, products, strict=True))
    else:
        taken = set(OURS)
        named = {head: Var(p) for head, p in zip(epilogue.variables, products, strict=False)}
        for variable, type in site.operands:
            name = underscored(variable, taken, RESERVED)
            operands.append(Value(name, type))
            named[variable] = Var(name)
        many = len(site.node.types) > 1
        results = tuple(
            Result(Value(f"y{i}" if many else "y", type), substitute(reread(text), named))
            for i, (type, text) in enumerate(zip(site.node.types, epilogue.outputs, strict=True))
        )
    x = Value("x", site.inputs[0])
    return Parts(x, gain, weights, scales, products, tuple(operands), results, op.norm, epilogue is not None)


def row_function(site: Site, parts: Parts, made_by: str) -> GeneratedFunction:
    """Returns the description of the generated function. The summary of the function ends with `made_by`, such as "in
    one kernel"."""
    inputs, outputs = ({value.name: value.type for value in values} for values in (parts.inputs, parts.outputs))
    shapes = {value.name: f"[{', '.join(dims(value))}]" for value in (*parts.inputs, *parts.outputs)}
    words = "linear layer" if len(parts.weights) == 1 else f"{len(parts.weights)} linear layers"
    words = f"{'norm and ' * (parts.norm is not None)}{words}{' and epilogue' * parts.epilogue}"
    return generated_function(site, inputs, outputs, shapes, f"{site.label}: {words} {made_by}.", parts.formulas)


def dims(value: Value, rows: str = "...") -> tuple[str, ...]:
    """Returns the dims of a value as text. `rows` replaces all dims except the last. Dims that are numbers, as in a
    weight, are not replaced."""
    *leading, width = value.type.shape
    if leading and all(isinstance(dim, int) for dim in leading):  # a weight; its packed codes have W bytes per row
        return (*map(str, leading), str(width))
    return (rows, str(width)) if leading else (str(width),)
