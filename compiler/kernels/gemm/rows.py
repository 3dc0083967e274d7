"""Linear layers of few rows: a Triton kernel that reads weights once at the speed of memory, and plain Torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from specc.compiler.expr import ExprError, Var, reread, substitute, torch_text, triton_text
from specc.compiler.ir.types import BYTES, DTYPES, TensorType
from specc.compiler.kernels.epilogue import FLOATS, RESERVED, Result, Value
from specc.compiler.kernels.gemm.triton import LARGEST_WEIGHT
from specc.compiler.kernels.generated import (
    TRITON_DTYPES,
    GeneratedFunction,
    generated_function,
    number_of,
    python_file,
)
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, unless_cpu
from specc.compiler.kernels.lines import listed, nested, returned
from specc.compiler.ops.decoding.row_linear import RowLinear
from specc.compiler.ops.norm import RmsNorm

MULTIPROCESSORS = 132  # programs for one row of x are at least so many if the weights have enough rows
LOADED = 4096  # elements of a weight that a program of one row loads at once
EACH = 16  # of them, those that each thread loads: two vectors of 16 bytes
DEPENDENT_LAUNCH = 90  # the first architecture with programmatic dependent launch
MOST_ROWS = 64  # rows of x up to which these kernels are used
LINE = 256  # bytes of a row that a program of several rows loads at once
AHEAD = 4  # pieces of weights of one row in flight; each takes 8 registers of a thread
IN_FLIGHT = 65_536  # bytes that a multiprocessor must have requested, as in attention over a cache
STAGES = 8  # at most, of such loads
HEIGHTS, WIDTHS = (64, 32, 16), (64, 32, 16)  # rows of x, and of the weights, of a program of several rows
ROWS_WARPS = 4
OURS = {"x", "gain", "product", "part", *(f"{letter}{i}" for letter in "wpy" for i in ("", *range(9)))}


@dataclass(frozen=True, slots=True)
class RowTile:
    """The pieces of a kernel for one row: `n` rows of weights per program, `k` features at a time."""

    n: int
    k: int
    warps: int

    def __str__(self) -> str:
        return f"{self.n}x{self.k}, {self.warps} warps"


@dataclass(frozen=True, slots=True)
class Parts:
    """The inputs and outputs of a site with the names of generated code.

    Each of `results` is an output and its expression over the products `p...` and the operands.
    """

    x: Value
    gain: tuple[Value, ...]
    weights: tuple[Value, ...]
    products: tuple[str, ...]
    operands: tuple[Value, ...]
    results: tuple[Result, ...]
    norm: RmsNorm | None
    epilogue: bool

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x, *self.gain, *self.weights, *self.operands)

    @property
    def outputs(self) -> tuple[Value, ...]:
        return tuple(result.value for result in self.results)

    @property
    def widths(self) -> tuple[int, ...]:
        """The extents N of the parts of a kernel: of each weight, or of all, if they have a common epilogue."""
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
        products = (f"{p} = {h} {w.name}^T" for p, w in zip(self.products, self.weights, strict=True))
        results = (f"{result.value.name} = {result.expr}" for result in self.results)
        return (*norm, *products, *results)


def parts_of(site: Site) -> Parts:
    """Returns the inputs and outputs of a `RowLinear`."""
    op, epilogue = site.node.op, site.epilogue
    assert isinstance(op, RowLinear)
    counted = [""] if op.weights == 1 else [str(i) for i in range(op.weights)]
    products = tuple(f"p{i}" for i in counted)
    weights = tuple(Value(f"w{i}", type) for i, type in zip(counted, site.inputs[op.first : op.arity], strict=True))
    gain = tuple(Value("gain", type) for type in site.inputs[1 : op.first])
    operands: list[Value] = []
    if epilogue is None:
        outputs = [Value(f"y{i}", type) for i, type in zip(counted, site.node.types, strict=True)]
        results = tuple(Result(y, Var(p)) for y, p in zip(outputs, products, strict=True))
    else:
        taken = set(OURS)
        named = {head: Var(p) for head, p in zip(epilogue.variables, products, strict=False)}
        for variable, type in site.operands:
            name = variable
            while name in taken or name in RESERVED:
                name += "_"
            taken.add(name)
            operands.append(Value(name, type))
            named[variable] = Var(name)
        many = len(site.node.types) > 1
        results = tuple(
            Result(Value(f"y{i}" if many else "y", type), substitute(reread(text), named))
            for i, (type, text) in enumerate(zip(site.node.types, epilogue.outputs, strict=True))
        )
    x = Value("x", site.inputs[0])
    return Parts(x, gain, weights, products, tuple(operands), results, op.norm, epilogue is not None)


def row_function(site: Site, parts: Parts, made_by: str) -> GeneratedFunction:
    """Returns the description of the generated function. `made_by` is the end of the summary, e.g. `in one kernel`."""
    inputs, outputs = ({value.name: value.type for value in values} for values in (parts.inputs, parts.outputs))
    shapes = {value.name: f"[{', '.join(dims(value))}]" for value in (*parts.inputs, *parts.outputs)}
    words = "linear layer" if len(parts.weights) == 1 else f"{len(parts.weights)} linear layers"
    words = f"{'norm and ' * (parts.norm is not None)}{words}{' and epilogue' * parts.epilogue}"
    return generated_function(site, inputs, outputs, shapes, f"{site.label}: {words} {made_by}.", parts.formulas)


def dims(value: Value, rows: str = "...") -> tuple[str, ...]:
    """Returns the dims of a value as text, with `rows` for the dims of rows."""
    *leading, width = value.type.shape
    if leading and all(isinstance(dim, int) for dim in leading):  # a weight
        return (*map(str, leading), str(width))
    return (rows, str(width)) if leading else (str(width),)


@dataclass(frozen=True, slots=True)
class TritonContext:
    """The context of templates/triton/row_linear.py.jinja.

    Attributes:
        op: the description of the function.
        k: the features of the input.
        normed: whether there is a norm.
        gain: the argument of the norm's weight, with a comma; empty for none.
        row_norm: the lines of the norm for one row.
        rows_norm: its lines for several rows.
        scaled: the result, as text, after the norm.
        row: the tile for one row.
        rows_k: the features that a program of several rows loads at once.
        rows_warps: the warps of such a program.
        tiles: the possible numbers of rows of x, and of the weights, of such a program.
        line: the bytes of `rows_k` features.
        in_flight: the bytes of its loads in flight.
        stages: the largest number of its stages.
        shared_memory: the bytes of shared memory that its stages may use.
        multiprocessors: the number of multiprocessors, for which these numbers are chosen.
        ahead: the pieces of weights that a program of one row loads before it waits for the kernel before it.
        pdl: whether a kernel begins before the one before it ends, which needs weights that no kernel computes.
        widths: the tuple of the extents N of the parts.
        part: the signature of a part.
        lines: the lines that compute its products, then its epilogue.
        kernel: the signature of the kernel.
        calls: the lines of the kernel that run its parts.
        tensors: the arguments of the launch.
        copied: the line that copies inputs with gaps between rows.
        wanted: rows of the table of input checks.
        allocated: lines that allocate the outputs.
        result: the returned expression.
    """

    TEMPLATE: ClassVar[str] = "triton/row_linear.py.jinja"
    op: GeneratedFunction
    k: int
    normed: bool
    gain: str
    row_norm: tuple[str, ...]
    rows_norm: tuple[str, ...]
    scaled: str
    row: RowTile
    rows_k: int
    rows_warps: int
    tiles: tuple[tuple[int, ...], tuple[int, ...]]
    line: int
    in_flight: int
    stages: int
    shared_memory: int
    multiprocessors: int
    ahead: int
    pdl: bool
    widths: str
    part: str
    lines: tuple[str, ...]
    kernel: str
    calls: tuple[str, ...]
    tensors: str
    copied: str
    wanted: str
    allocated: str
    result: str


class RowLinearTriton(Kernel):
    """A program multiplies all rows, up to 64, with some rows of the weights, which are read once.

    With one row, threads multiply and sum; with several, tensor cores do. The mean square of the norm is summed in the
    same loop over the features, and scales the sums.
    """

    def rejects(self, site: Site) -> str | None:
        parts = parts_of(site)
        for value in (*parts.inputs, *parts.outputs):
            if value.type.dtype not in FLOATS:
                return f"computes {', '.join(FLOATS)}; {value.name} is {value.type.dtype}"
        if odd := next((weight for weight in parts.weights if weight.type.dtype != parts.x.type.dtype), None):
            return f"multiplies two operands of the same dtype; the input is {parts.x.type.dtype} and {odd}"
        if largest := next((n * parts.k for n in parts.widths if n * parts.k >= LARGEST_WEIGHT), 0):
            return f"addresses weights with 32-bit offsets; {largest} elements need more"
        try:
            for result in parts.results:
                triton_text(result.expr)
        except ExprError as error:
            return f"cannot print the epilogue: {error.message}"
        return None

    def render(self, site: Site) -> Rendered:
        parts = parts_of(site)
        op = row_function(site, parts, "in one kernel")
        context = _context(site, op, parts, row_tile(parts))
        return python_file(
            op, context.TEMPLATE, context, f"{context.row}; 16 to 64x{context.rows_k}, {ROWS_WARPS} warps"
        )


ROW_LINEAR_TRITON = RowLinearTriton("row_linear_triton", "triton", frozenset({"mma"}), RowLinear)


def row_tile(parts: Parts) -> RowTile:
    """Returns the tile for one row."""
    n = next((n for n in (16, 8, 4, 2) if sum(-(-width // n) for width in parts.widths) >= MULTIPROCESSORS), 1)
    most = LOADED // n // len(parts.products if parts.epilogue else parts.products[:1])
    exact = parts.k & -parts.k  # the largest power of two that divides K needs no mask
    k = min(most, exact if exact >= 128 else 1 << (parts.k - 1).bit_length())
    return RowTile(n, k, min(8, max(1, n * k // (32 * EACH))))


def _context(site: Site, op: GeneratedFunction, parts: Parts, row: RowTile) -> TritonContext:
    size = BYTES[parts.x.type.dtype]
    rows_k = min(LINE // size, max(16, 1 << (parts.k - 1).bit_length()))
    gain = "gain_ptr, " * len(parts.gain)
    names = [f"{value.name}_ptr" for value in (*parts.inputs, *parts.outputs)]
    inner = names if parts.epilogue else ["x_ptr", *gain.split(", ")[:-1], "w_ptr", "y_ptr"]
    constants = ("K", "BLOCK_M", "BLOCK_N", "BLOCK_K", "PDL")
    sizes = [f"{name}: tl.constexpr" for name in constants]
    weights = [value.name for value in parts.weights] if parts.epilogue else ["w"]
    products = parts.products if parts.epilogue else ("p",)
    results = parts.results if parts.epilogue else (Result(Value("y", parts.outputs[0].type), Var("p")),)
    op_of_node = site.node.op
    assert isinstance(op_of_node, RowLinear)
    weights_read = site.node.inputs[op_of_node.first : op_of_node.arity]  # computed ones are not known before
    both = ("squares += x * x", "squares += x.to(tl.float32) * x.to(tl.float32)")
    squares = both if parts.norm is not None else ()
    load = "tl.load(gain_ptr + ks, mask=ks < K, other=0.0)"
    calls: list[str] = []
    for i, width in enumerate(parts.widths):
        some = names if parts.epilogue else ["x_ptr", *gain.split(", ")[:-1], f"{parts.weights[i].name}_ptr"]
        some = [*some, *([] if parts.epilogue else [f"{parts.outputs[i].name}_ptr"])]
        call = [*some, "tile", "M", str(width), *constants]
        if len(parts.widths) == 1:
            calls.append(listed("part(", call, ")", 4).lstrip())
            break
        inside = f"(tile >= 0) & (tile < tl.cdiv({width}, BLOCK_N))" if i else f"tile < tl.cdiv({width}, BLOCK_N)"
        calls += [f"if {inside}:", f"    {listed('part(', call, ')', 8).lstrip()}"]
        calls += [f"tile -= tl.cdiv({width}, BLOCK_N)"] if i + 1 < len(parts.widths) else []
    return TritonContext(
        op=op,
        k=parts.k,
        normed=parts.norm is not None,
        gain=gain,
        row_norm=(*squares[:1], *(f"x *= {load}.to(tl.float32)" for _ in parts.gain)),
        rows_norm=(*squares[1:], *(f"x = (x * {load}[None, :]).to(w.dtype)" for _ in parts.gain)),
        scaled=f"result * tl.rsqrt(mean + {parts.norm.eps!r})" if parts.norm is not None else "result",
        row=row,
        rows_k=rows_k,
        rows_warps=ROWS_WARPS,
        tiles=(HEIGHTS, WIDTHS),
        line=rows_k * size,
        in_flight=IN_FLIGHT,
        stages=STAGES,
        shared_memory=site.target.shared_memory,
        multiprocessors=MULTIPROCESSORS,
        ahead=AHEAD,
        pdl=site.target.arch >= DEPENDENT_LAUNCH and all(ref[0] == "@" for ref in weights_read),
        widths=str(parts.widths),
        part=listed("def part(", [*inner, "tile", "M", "N: tl.constexpr", *sizes], "):"),
        lines=(
            *(
                f"{p} = product(x_ptr, {gain}{w}_ptr, rows, columns, {', '.join(constants)})"
                for p, w in zip(products, weights, strict=True)
            ),
            *_epilogue(parts.operands, results),
        ),
        kernel=listed(f"def {op.function}_kernel(", [*names, "M", *sizes], "):"),
        calls=tuple(calls),
        tensors=listed("", [name.removesuffix("_ptr") for name in names], ",", indent=8),
        copied=_copied([parts.x, *(value for value in parts.operands if not value.column)]),
        wanted="\n".join(f"        {_wanted(value)}" for value in parts.inputs),
        allocated="\n".join(f"    {_allocated(value, parts.x.type)}" for value in parts.outputs),
        result=", ".join(value.name for value in parts.outputs),
    )


def _epilogue(operands: Sequence[Value], results: Sequence[Result]) -> Iterator[str]:
    for value in operands:
        place, mask = ("columns[None, :]", "columns[None, :] < N") if value.column else ("at", "inside")
        yield nested(value.name, f"tl.load({value.name}_ptr + {place}, mask={mask}, other=0.0).to(tl.float32)")
    for result in results:
        value = result.value
        yield nested(value.name, triton_text(result.expr))
        yield f"tl.store({value.name}_ptr + at, {value.name}.to({TRITON_DTYPES[value.type.dtype]}), mask=inside)"


def _copied(values: Sequence[Value]) -> str:
    return (
        f"{', '.join(value.name for value in values)} = {', '.join(f'{value.name}.contiguous()' for value in values)}"
    )


def _wanted(value: Value) -> str:
    shape = ", ".join(dims(value, "*rows"))
    return f'("{value.name}", {value.name}, ({shape}{"," if value.column else ""}), {DTYPES[value.type.dtype]}),'


def _allocated(value: Value, x: TensorType) -> str:
    dtype = "" if value.type.dtype == x.dtype else f", dtype={DTYPES[value.type.dtype]}"
    return f"{value.name} = x.new_empty(*rows, {value.type.width}{dtype})"


@dataclass(frozen=True, slots=True)
class TorchContext:
    """The context of templates/torch/row_linear.py.jinja."""

    op: GeneratedFunction
    lines: tuple[str, ...]
    returns: str
    uses_torch: bool


class RowLinearTorch(Kernel):
    """The norm, the products and the epilogue in plain Torch, in the dtype of the inputs."""

    RANK: ClassVar[int] = 9

    def rejects(self, site: Site) -> str | None:
        return unless_cpu(site, "would run the norm, the products and the epilogue as separate kernels")

    def render(self, site: Site) -> Rendered:
        parts = parts_of(site)
        op, lines = row_function(site, parts, "in plain Torch"), []
        if parts.norm is not None:
            gain = "".join(f", {value.name}" for value in parts.gain)
            lines.append(f"x = F.rms_norm(x, ({parts.k},){gain}, eps={parts.norm.eps})")
        lines += [f"{p} = F.linear(x, {w.name})" for p, w in zip(parts.products, parts.weights, strict=True)]
        texts = []
        for result in parts.results:
            text, dtype = torch_text(result.expr), result.value.type.dtype
            texts.append(text if dtype == parts.x.type.dtype else f"({text}).to({DTYPES[dtype]})")
        context = TorchContext(op, tuple(lines), returned(", ".join(texts)), "torch." in " ".join(texts))
        return python_file(op, "torch/row_linear.py.jinja", context)


ROW_LINEAR_TORCH = RowLinearTorch("row_linear_torch", "torch", computes=RowLinear)
