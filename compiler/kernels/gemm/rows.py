"""Linear layers with few input rows, in Triton. The kernel reads each weight once, at the memory bandwidth."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from specc.compiler.expr import ExprError, Var, triton_text
from specc.compiler.ir.types import BYTES, DTYPES, TensorType
from specc.compiler.kernels.epilogue import FLOATS, Result, Value
from specc.compiler.kernels.gemm.row_parts import Parts, dims, parts_of, row_function
from specc.compiler.kernels.gemm.triton import LARGEST_WEIGHT
from specc.compiler.kernels.generated import (
    TRITON_DTYPES,
    GeneratedFunction,
    python_file,
)
from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.kernels.lines import flowed, listed, nested, unbroken
from specc.compiler.ops.decoding.packed_codes import ALIGNMENT, CODES
from specc.compiler.ops.decoding.row_linear import RowLinear
from specc.compiler.ops.norm import RmsNorm
from specc.compiler.records import record

MULTIPROCESSORS = 132  # the fewest programs for one row of x, if the weights have enough rows
LOADED = 4096  # elements of a weight that a program instance for one row of x loads at once
EACH = 16  # elements that each thread loads at once: two vectors of 16 bytes
LANES = 2048  # lanes of packed codes that a program instance for one row of x loads at once
EACH_LANES = 4  # lanes that each thread loads at once: with 4-bit codes, a vector of 16 bytes
DEPENDENT_LAUNCH = 90  # the first architecture with programmatic dependent launch
MOST_ROWS = 64  # the most rows of x for which these kernels are used
LINE = 256  # bytes of a row that a program instance for several rows of x loads at once
AHEAD = 4  # with one row of x, pieces of the weights in flight; each takes 8 registers per thread
IN_FLIGHT = 65_536  # bytes that each multiprocessor must have in flight, as in attention over a cache
STAGES = 8  # the most pipeline stages of these loads
# Rows of x, and rows of the weights, per program instance for several rows of x
HEIGHTS, WIDTHS = (64, 32, 16), (64, 32, 16)
ROWS_WARPS = 4
PARTS = 8  # the most program instances that share a tile for several rows, each with a part of the features
# Two fences, a counter in the L2 cache, and the first load of sums take about 1.7 us. In this time, a multiprocessor
# loads JOIN bytes from the L2 cache.
JOIN = 98_304
JOINED = (
    "if PARTS > 1:",
    "    p, last = joined(p, partial_ptr, counts_ptr, BLOCK_M, BLOCK_N, PARTS)",
    "    inside &= last",
)
# The sum of squares and an asynchronous product read the same buffer of x. Triton would load the next piece into this
# buffer while the product still reads the buffer. A product is not asynchronous if its result is read in each step.
ENDED = (
    "if BLOCK_M > 32:  # the product ends before the next piece of x is loaded",
    "    result = tl.where(k < K, result, 0.0)",
)
SPAN = "SPAN: tl.constexpr = (K + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K) * BLOCK_K  # features of a part"
BEGIN = "tl.program_id(2) * SPAN"
PARTIAL = (
    "partial = count = x",
    "if parts > 1:",
    "    partial = x.new_empty(tiles * heights * parts * height * n, dtype=torch.float32)",
    "    count = counts(x)",
)


@record
class RowTile:
    """The tile of a kernel for one row of x. A program instance multiplies `n` rows of the weights, and reads `k`
    features at a time. If the weights are packed codes, the program instance reads `k` lanes at a time. A lane holds
    eight codes."""

    n: int
    k: int
    warps: int

    def __str__(self) -> str:
        return f"{self.n}x{self.k}, {self.warps} warps"


@record
class TritonContext:
    """The context of templates/triton/row_linear.py.jinja.

    There are two kinds of program instances: for one row of x, and for several rows of x. A lane holds eight packed
    codes.

    Attributes:
        op: The description of the function.
        k: The number of input features.
        normed: Whether there is a norm.
        gain: The argument for the norm's weight, with a comma. Empty if the norm has no weight.
        row_norm: The lines of the norm for one row.
        rows_norm: The lines of the norm for several rows.
        ended: Lines after each product that wait for the end of the product. Empty without a norm.
        scaled: An expression: the products, times the scales of codes, times the factor of the norm.
        row: The tile for one row.
        product: The template of the function that multiplies x with weights: floats, or packed codes.
        lanes: The number of lanes per row of weights.
        rows_k: The features or lanes that a program instance for several rows loads at once.
        rows_extent: The number of features or lanes per row.
        rows_warps: The warps of a program instance for several rows.
        tiles: For several rows, two lists: the possible numbers of rows of x, and of rows of the weights, per program
            instance.
        pieces: For several rows, the bytes of one load: per row of x, and per row of the weights.
        in_flight: For several rows, the bytes that a program instance has in flight.
        stages: For several rows, the largest number of pipeline stages.
        shared_memory: The bytes of shared memory that the stages may use.
        multiprocessors: The number of multiprocessors for which the sizes above were chosen.
        slices: The largest number of slices into which the features are divided, for the tile with the fewest rows.
            Each warp sums one slice. 1 if the features are not divided.
        slices_name: The launch argument with the number of slices. `_` for codes, which have no slices.
        split: Whether several program instances may share a tile for several rows, each with a part of the features.
        span, begin: The number of features of a part, and the first feature of a part, as expressions.
        span_lines, begin_lines: Lines that define `span` and that move to the first feature. Empty without parts.
        parts: The largest number of program instances that share a tile. 1 unless `split`.
        join: The bytes that a multiprocessor could load while program instances that share a tile wait for each other.
        parts_name: The launch argument with the number of parts. `_` if the features are not split.
        parts_constant: The kernel's parameter for the number of parts, with a leading space and a comma. Empty if the
            features are not split.
        counters: The line that defines the counters of the program instances of each tile.
        partial: Lines of the launch that define the tensors of partial sums and counters.
        ahead: The number of loads that a program instance for one row issues before it waits for the preceding kernel.
        pdl: Whether the kernel may begin before the preceding kernel ends (programmatic dependent launch). This
            requires that no kernel computes the weights.
        widths: The extents N of the parts, as the text of a tuple.
        part: The signature of the function that computes a part.
        early: Lines of the function `part` that load or request weights, before the wait for the preceding kernel.
        lines: The lines after the wait: the products of the part, then the epilogue. A program instance for one row
            loads the operands of the epilogue before the products. A program instance for several rows loads these
            operands after the products.
        kernel: The signature of the kernel.
        calls: Lines of the kernel that call the function `part` once per part.
        tensors: The tensor arguments of the launch.
        sizes: The other arguments of the launch.
        copied: The line that copies inputs whose rows are not adjacent.
        wanted: The input checks of the generated function.
        allocated: Lines that allocate the outputs.
        result: The returned expression.
    """

    TEMPLATE: ClassVar[str] = "triton/row_linear.py.jinja"
    op: GeneratedFunction
    k: int
    normed: bool
    gain: str
    row_norm: tuple[str, ...]
    rows_norm: tuple[str, ...]
    ended: tuple[str, ...]
    scaled: str
    row: RowTile
    product: str
    lanes: int
    rows_k: int
    rows_extent: int
    rows_warps: int
    tiles: tuple[tuple[int, ...], tuple[int, ...]]
    pieces: tuple[int, int]
    in_flight: int
    stages: int
    shared_memory: int
    multiprocessors: int
    slices: int
    slices_name: str
    split: bool
    span: str
    begin: str
    span_lines: tuple[str, ...]
    begin_lines: tuple[str, ...]
    parts: int
    join: int
    parts_name: str
    parts_constant: str
    counters: tuple[str, ...]
    partial: tuple[str, ...]
    ahead: int
    pdl: bool
    widths: str
    part: str
    early: tuple[str, ...]
    lines: tuple[str, ...]
    kernel: str
    calls: tuple[str, ...]
    tensors: str
    sizes: str
    copied: str
    wanted: str
    allocated: str
    result: str


class RowLinearTriton(Kernel):
    """A program instance multiplies all rows of x, at most 64, with some rows of the weights. Each weight is read
    once.

    For one row of x, threads multiply and sum. For several rows, tensor cores multiply. A single program instance on a
    multiprocessor would wait for a chain of sums. With up to 16 rows, the warps therefore divide the features among
    themselves.

    The loop over the features also sums the squares of x for the norm. After the loop, the products are divided by the
    root of the mean square.
    """

    def rejects(self, site: Site) -> str | None:
        parts = parts_of(site)
        for value in (*parts.inputs, *parts.outputs):
            if value.type.dtype not in FLOATS and not (parts.scales and value in parts.weights):
                return f"computes {', '.join(FLOATS)}; {value.name} is {value.type.dtype}"
        odd = next((weight for weight in parts.weights if weight.type.dtype != parts.x.type.dtype), None)
        if odd is not None and not parts.scales:
            return f"multiplies two operands of the same dtype; the input is {parts.x.type.dtype} and {odd}"
        k = parts.lanes * CODES if parts.scales else parts.k
        if largest := next((n * k for n in parts.widths if n * k >= LARGEST_WEIGHT), 0):
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
    n = next((n for n in (16, 8, 4, 2) if sum(-(-width // n) for width in parts.widths) >= MULTIPROCESSORS), 1)
    loaded, each, extent, least = (
        (LANES, EACH_LANES, parts.lanes, 2 * ALIGNMENT) if parts.scales else (LOADED, EACH, parts.k, 128)
    )
    products = len(parts.products) if parts.epilogue else 1
    most = loaded // n >> (products - 1).bit_length()  # a power of two, like the extents of all tiles
    exact = extent & -extent  # with the largest power of two that divides the extent, loads need no mask
    k = min(most, exact if exact >= least else 1 << (extent - 1).bit_length())
    return RowTile(n, k, min(8, max(1, n * k // (32 * each))))


def rows_piece(parts: Parts) -> tuple[int, tuple[int, int]]:
    """Returns the size of one load for several rows of x: the number of features (or lanes of eight codes), then the
    bytes per row of x and per row of the weights."""
    size = BYTES[parts.x.type.dtype]
    if parts.scales:  # a load covers a few lanes and all of their features of x
        k = min(2 * ALIGNMENT, parts.lanes & -parts.lanes)
        return k, (k * CODES * size, k * CODES)  # codes have at most 8 bits
    k = min(LINE // size, max(16, 1 << (parts.k - 1).bit_length()))
    return k, (k * size, k * size)


def _context(site: Site, op: GeneratedFunction, parts: Parts, row: RowTile) -> TritonContext:
    rows_k, pieces = rows_piece(parts)
    gain = "gain_ptr, " * len(parts.gain)
    names = [f"{value.name}_ptr" for value in (*parts.inputs, *parts.outputs)]
    before = names[: 1 + len(parts.gain)]
    stored = [[f"{value.name}_ptr" for value in each] for each in parts.stored]
    # The weights that each part of the kernel reads
    of_part = stored if parts.epilogue else [["w_ptr", "s_ptr"][: len(stored[0])]]
    bits = parts.bits if parts.epilogue else ("BITS",)[: len(parts.bits)]
    inner = names if parts.epilogue else [*before, *of_part[0], "y_ptr"]
    slices = () if parts.scales else ("slices",)
    # With a norm, program instances would also have to exchange sums of squares. With several products, they would have
    # to exchange several sums.
    split = parts.norm is None and not parts.scales and len(parts.products) == len(parts.widths)
    sums = ["partial_ptr", "counts_ptr"] if split else []  # tensors of the programs that share a tile
    parts_word = ["parts"] if split else []
    counted = [name.upper() for name in (*slices, *parts_word)]
    constants = ("K", "BLOCK_M", "BLOCK_N", "BLOCK_K", *counted, "PDL")
    sliced = not parts.scales and BYTES[parts.x.type.dtype] == 2 and parts.k >= 2 * rows_k  # products of 16 bits only
    products = parts.products if parts.epilogue else ("p",)
    results = parts.results if parts.epilogue else (Result(Value("y", parts.outputs[0].type), Var("p")),)
    op_of_node = site.node.op
    assert isinstance(op_of_node, RowLinear)
    # Computed weights are not known before the preceding kernel ends
    weights_read = site.node.inputs[op_of_node.first : op_of_node.arity]
    both = ("squares += x * x", "squares += x.to(tl.float32) * x.to(tl.float32)")
    squares = both if parts.norm is not None else ()
    load = "tl.load(gain_ptr + ks, mask=ks < K, other=0.0)"
    called = [  # products, the tensors of their weights, and constants
        (p, ", ".join(w), ", ".join((*constants, *each)))
        for p, w, *each in zip(products, of_part, *([bits] if bits else []), strict=True)
    ]
    calls: list[str] = []
    for i, width in enumerate(parts.widths):
        some = names if parts.epilogue else [*before, *stored[i], f"{parts.outputs[i].name}_ptr"]
        call = [*some, *sums, "tile", "M", str(width), *constants, *(bits if parts.epilogue else parts.bits[i : i + 1])]
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
        rows_norm=(*squares[1:], *(f"x = (x * {load}).to(x_ptr.dtype.element_ty)" for _ in parts.gain)),
        ended=ENDED if parts.norm is not None else (),
        scaled=" * ".join(("result", *["scale"] * bool(parts.scales), *_root(parts.norm))),
        row=row,
        product=f"triton/row_linear_{'codes' if parts.scales else 'floats'}.jinja",
        lanes=parts.lanes,
        rows_k=rows_k,
        rows_extent=parts.lanes if parts.scales else parts.k,
        rows_warps=ROWS_WARPS,
        tiles=(HEIGHTS, WIDTHS),
        pieces=pieces,
        in_flight=IN_FLIGHT,
        stages=STAGES,
        shared_memory=site.target.shared_memory,
        multiprocessors=MULTIPROCESSORS,
        slices=ROWS_WARPS if sliced else 1,
        slices_name=next(iter(slices), "_"),
        split=split,
        span="SPAN" if split else "K",
        begin=BEGIN if split else "0",
        span_lines=(SPAN,) if split else (),
        begin_lines=("if PARTS > 1:", f"    features += {BEGIN}") if split else (),
        parts=PARTS if split else 1,
        join=JOIN,
        parts_name=next(iter(parts_word), "_"),
        parts_constant=" PARTS: tl.constexpr," * split,
        counters=("COUNTS: dict[torch.device, Tensor] = {}",) if split else (),
        partial=PARTIAL if split else (),
        ahead=AHEAD,
        pdl=site.target.arch >= DEPENDENT_LAUNCH and all(ref[0] == "@" for ref in weights_read),
        widths=str(parts.widths),
        part=listed("def part(", [*inner, *sums, "tile", "M", *_constant("N", *constants, *bits)], "):"),
        early=tuple(_call(f"first_{p} = early(", w, "columns", words) for p, w, words in called),
        lines=(
            *_operands(parts.operands, "== 1"),
            *(_call(f"{p} = product(", f"x_ptr, {gain}{w}, first_{p}, rows, columns", words) for p, w, words in called),
            *(JOINED if split else ()),
            *_operands(parts.operands, "> 1"),
            *_results(results),
        ),
        kernel=listed(f"def {op.function}_kernel(", [*names, *sums, "M", *_constant(*constants, *parts.bits)], "):"),
        calls=tuple(calls),
        tensors=_arguments(*(name.removesuffix("_ptr") for name in names), *(("partial", "count") if split else ())),
        sizes=_arguments(
            "m",
            "K",
            "height",
            "n",
            "k",
            *slices,
            *parts_word,
            "PDL",
            *map(_bits, parts.weights if parts.scales else ()),
        ),
        copied=_copied([parts.x, *(value for value in parts.operands if not value.column)]),
        wanted="\n".join(f"        {_wanted(value)}" for value in parts.inputs),
        allocated="\n".join(f"    {_allocated(value, parts.x.type)}" for value in parts.outputs),
        result=", ".join(value.name for value in parts.outputs),
    )


def _root(norm: RmsNorm | None) -> tuple[str, ...]:
    return (f"tl.rsqrt(mean + {norm.eps!r})",) if norm is not None else ()


def _constant(*names: str) -> list[str]:
    return [f"{name}: tl.constexpr" for name in names]


def _arguments(*texts: str) -> str:
    return flowed(f"{', '.join(map(unbroken, texts))},", " " * 8)


def _bits(weight: Value) -> str:
    return f"{weight.name}.shape[-1] // LANES.value"


def _call(head: str, *arguments: str) -> str:
    return listed(head, ", ".join(arguments).split(", "), ")", 4).lstrip()


def _operands(operands: Sequence[Value], rows: str) -> Iterator[str]:
    """Yields the lines that load operands of the epilogue. The lines run only if the number of rows satisfies `rows`, a
    comparison such as `> 1`."""
    if operands:
        yield f"if BLOCK_M {rows}:"
    for value in operands:
        place, mask = ("columns[None, :]", "columns[None, :] < N") if value.column else ("at", "inside")
        load = f"tl.load({value.name}_ptr + {place}, mask={mask}, other=0.0).to(tl.float32)"
        yield f"    {nested(value.name, load, 8)}"


def _results(results: Sequence[Result]) -> Iterator[str]:
    for result in results:
        value = result.value
        yield nested(value.name, triton_text(result.expr))
        yield f"tl.store({value.name}_ptr + at, {value.name}.to({TRITON_DTYPES[value.type.dtype]}), mask=inside)"


def _copied(values: Sequence[Value]) -> str:
    return (
        f"{', '.join(value.name for value in values)} = {', '.join(f'{value.name}.contiguous()' for value in values)}"
    )


def _wanted(value: Value) -> str:
    shape = ", ".join(f"{_bits(value)} * LANES.value" if dim == "W" else dim for dim in dims(value, "*rows"))
    return f'("{value.name}", {value.name}, ({shape}{"," if value.column else ""}), {DTYPES[value.type.dtype]}),'


def _allocated(value: Value, x: TensorType) -> str:
    dtype = "" if value.type.dtype == x.dtype else f", dtype={DTYPES[value.type.dtype]}"
    return f"{value.name} = x.new_empty(*rows, {value.type.width}{dtype})"
