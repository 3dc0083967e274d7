"""The template contexts for attention with a score and a mask."""

from typing import NamedTuple

from specc.compiler.expr.mask import sees_later
from specc.compiler.expr.python_lines import INSIDE
from specc.compiler.ir.types import DTYPES, TensorType
from specc.compiler.kernels.attention.attention import BACKWARD, inputs_of, table_name
from specc.compiler.kernels.attention.score_lines import NEAREST, Reading, ScoreLines
from specc.compiler.kernels.attention.score_tile import ScoreGradTile, ScoreTile, block
from specc.compiler.kernels.generated import TRITON_DTYPES, GeneratedFunction, generated_function, number_of
from specc.compiler.kernels.kernel import Site
from specc.compiler.kernels.lines import flowed, listed, unbroken
from specc.compiler.ops.saved_attention import ScoredAttention, ScoredAttentionGrad
from specc.compiler.records import record

# The most elements of a table whose index is not a function of i - j: a program instance holds one sum per element
MOST_ENTRIES = 2048
SPLITS = 16  # number of programs that share the tiles of one offset, in the kernel that sums over pairs of equal i - j
LISTS = ("counts", "order")
LOG2E = 1.4426950408889634
CONSTANTS = ("H", "G", "C", "SCALE", "QUERIES", "KEYS", "WIDTH")
START_BOUNDS = (
    "start0 = tl.load(start_ptr + b.to(tl.int64) * T + i0, mask=i0 < T, other=0).to(tl.int32)",
    "start1 = tl.load(start_ptr + b.to(tl.int64) * T + i1, mask=i0 < T, other=0).to(tl.int32)",
)
NO_SINK = (
    'base = tl.where(most == float("-inf"), 0.0, most)  # of a query that sees no key',
    "total = tl.where(total == 0.0, 1.0, total)",
)
SINK = (
    "sink = tl.load(sinks_ptr + h).to(tl.float32) * LOG2E",
    "base = tl.maximum(most, sink)",
    "shrink = tl.exp2(most - base)",
    "total, y = total * shrink + tl.exp2(sink - base), y * shrink[:, None]",
)


@record
class Part:
    """One of two loops over a row of tiles. One loop visits the tiles with masked pairs. The other loop visits the
    remaining tiles.

    Attributes:
        comment: A comment on the loop.
        span: The bounds of the loop, as arguments of `tl.range`.
        tiles: The number of tiles that the loop visits in the kernel of dk and dv, as an expression.
        start: The index of the first tile, followed by " + ". Empty if the loop begins with the first tile of the row.
        keys: Additional arguments of the loads of keys and values, such as a mask.
        scores: Lines that compute the scores x and, if some are masked, the mask `seen`.
        base: The number that is subtracted from scores before the exponential, as an expression.
        weights: The weights of the softmax, as an expression.
        sums: Lines that add to the gradients of tables.
    """

    comment: str
    span: str
    tiles: str
    start: str
    keys: str
    scores: tuple[str, ...]
    base: str
    weights: str
    sums: tuple[str, ...]


class ScoredContext(NamedTuple):
    """The context of templates/triton/scored_attention.py.jinja.

    Attributes:
        how: A description of the kernel's algorithm.
        lines: The code of the score and the mask.
        tiles_kernel: The signature of the listing kernel, which lists tiles.
        bounds: Lines of the listing kernel that load the first positions of documents.
        list_tiles: The signature of the function that launches the listing kernel.
        tiles_arguments: The launch arguments of the listing kernel.
        listing: The call of the function `list_tiles`, without the arguments for the sizes of tiles.
        diagonals: For each read of a table by i - j: the read, and the signature of a kernel. The kernel sums the
            gradient of the table over query-key pairs with equal i - j. Empty in the forward pass.
        classes: Lines of the kernels in `diagonals` that compute `some` and `every` for a tile. `some` states whether
            some pairs are not masked. `every` states whether no pair is masked and all scores read the same elements.
            The kernels process a tile if `some` is true and `every` is false.
        mixed: Lines of the kernels in `diagonals` that compute the scores of a tile.
        located: Reads of tables for which the code computes indices before the launch. The index of such a read depends
            on the head and i - j or, in the backward pass, only on the head. If the index depends on i - j, the code
            copies the elements into strips (see `Reading`).
        helpers: Templates of functions that the kernels call.
        entries: The largest number of elements of a table whose index is not a function of i - j. A program instance
            holds the sum of the gradient of each element.
        body: The template of the kernels and their launch.
        kernels: The signatures of the kernels.
        arguments: The launch arguments of each kernel in `kernels`.
        queries, keys: The masks of valid queries (in terms of i) and valid keys (in terms of j), as expressions.
        key_rows, rows: The masks of valid elements in loads of key rows and of query rows, in terms of `key` and
            `query`.
        positions: Lines that define the variables of the score for a block of queries.
        row: The index of the row of tiles that a program instance computes, as an expression.
        parts, key_parts: The loops over a row of tiles: for a block of queries, and for a block of keys.
        element: The dtype of the operands of matrix products.
        slope: The gradient of the loss with respect to the scaled product s, as an expression.
        finish: Lines that complete the denominator of the softmax.
        sums_begin, sums_end: Lines that begin and store the sums for gradients of tables.
        key_sums_begin, key_sums_end: Like `sums_begin` and `sums_end`, but for the kernel that computes dk and dv.
        delta: The sum of dy * y over channels, as an expression. The kernel of dq stores this sum. If sums are
            corrected, the expression adds the rounding error of the sum.
        prepared: Lines before the launch of the kernels.
        summed: Lines after the launch of the kernels.
        wanted: The input checks of the generated function.
        allocated: Lines that allocate the outputs.
    """

    op: GeneratedFunction
    how: str
    heads: int
    kv_heads: int
    channels: int
    settings: str
    lines: ScoreLines
    tiles_kernel: str
    bounds: tuple[str, ...]
    list_tiles: str
    tiles_arguments: str
    listing: str
    diagonals: tuple[tuple[Reading, str], ...]
    classes: tuple[str, ...]
    mixed: tuple[str, ...]
    located: tuple[Reading, ...]
    helpers: tuple[str, ...]
    entries: int
    body: str
    kernels: tuple[str, ...]
    arguments: tuple[str, ...]
    queries: str
    keys: str
    key_rows: str
    rows: str
    positions: tuple[str, ...]
    row: str
    parts: tuple[Part, ...]
    key_parts: tuple[Part, ...]
    element: str
    slope: str
    finish: tuple[str, ...]
    sums_begin: tuple[str, ...]
    sums_end: tuple[str, ...]
    delta: str
    key_sums_begin: tuple[str, ...]
    key_sums_end: tuple[str, ...]
    prepared: tuple[str, ...]
    summed: tuple[str, ...]
    wanted: tuple[str, ...]
    allocated: tuple[str, ...]
    returns: str
    fake: str


def is_gradient(site: Site) -> bool:
    return isinstance(site.node.op, ScoredAttentionGrad)


def prefix_reason(site: Site) -> str | None:
    """Returns None if the mask of a site is causal. Otherwise, returns the reason why a kernel rejects the site. The
    kernels that apply scores and masks to attention support only causal masks."""
    if sees_later(op_of(site).mask, number_of(inputs_of(site)["q"].shape[-2])):
        return "takes causal masks; this one lets the tokens of a prefix attend to each other"
    return None


def op_of(site: Site) -> ScoredAttention | ScoredAttentionGrad:
    assert isinstance(site.node.op, ScoredAttention | ScoredAttentionGrad)
    return site.node.op


def lines_of(site: Site) -> ScoreLines:
    op, inputs = op_of(site), inputs_of(site)
    tables = tuple((name, tuple(map(number_of, inputs[table_name(name)].shape))) for name in op.tables)
    return ScoreLines.of(*op.parsed(inputs["q"].shape[-2]), tables)


def _deeper(*lines: str) -> tuple[str, ...]:
    return tuple(line.replace("\n", "\n    ") for line in lines)


class Writer:
    """Writes the template contexts of one site."""

    def __init__(self, site: Site) -> None:
        self.site, self.op, self.inputs, self.lines = site, op_of(site), inputs_of(site), lines_of(site)
        self.backward = is_gradient(site)
        q, k = self.inputs["q"], self.inputs["k"]
        self.heads, self.kv_heads, self.channels = number_of(q.shape[-2]), number_of(k.shape[-2]), number_of(q.width)
        self.width, self.element = block(self.channels), TRITON_DTYPES[q.dtype]
        learned = [f"d{table_name(name)}" for name in self.op.further if name != "start"]
        names = ("dq", "dk", "dv", *learned) if self.backward else ("y", "lse")
        self.outputs = dict(zip(names, site.node.types, strict=True))
        self.further = [name for name in self.inputs if name not in (*BACKWARD, "v")]
        self.strips = self.lines.by_distance
        self.general = [reading for reading in self.lines.readings if reading.general]
        # Sums along i - j have few terms each, and their kernel is faster without the correction.
        self.exact = any(reading.distance is None for reading in self.lines.readings)
        self.by_queries = [reading for reading in self.lines.readings if not reading.general]
        self.inside = "" if self.width == self.channels else " & (c < C)"

    def context(self, tile: ScoreTile | ScoreGradTile) -> ScoredContext:
        if isinstance(tile, ScoreTile):
            settings = [tile.settings()]
            kernels = [self._forward_kernel()]
        else:
            settings = [tile.queries.settings("DQ_"), tile.keys.settings("DK_")]
            kernels = [self._queries_kernel(), self._keys_kernel()]
        settings.append(f"SCALE, WIDTH, LOG2E = {self._scale()!r}, {self.width}, tl.constexpr({LOG2E})")
        start = ["start"] if self.lines.documents else []
        pointers = [*(f"{name}_ptr" for name in start), "counts_ptr", "order_ptr", "T", "N"]
        sizes = [f"{name}: tl.constexpr" for name in ("QUERIES", "KEYS", "BY_KEYS", "MOST")]
        listing = ["q", *start, "len(start)" if start else "1"]
        parameters = [
            "q: Tensor",
            *(f"{name}: Tensor" for name in start),
            "b: int",
            "t: int",
            "queries: int",
            "keys: int",
        ]
        readings = self.lines.readings
        starts = START_BOUNDS if start else ()
        firsts = [line for reading in readings for line in reading.first()]
        return ScoredContext(
            op=self.function("tiles of scores"),
            how=self._how(),
            heads=self.heads,
            kv_heads=self.kv_heads,
            channels=self.channels,
            settings="\n".join(settings),
            lines=self.lines,
            tiles_kernel=listed("def tiles_kernel(", [*pointers, *sizes], "):"),
            bounds=(*starts, *self.lines.bounds),
            list_tiles=listed("def list_tiles(", [*parameters, "by_keys: bool"], ") -> tuple[Tensor, Tensor]:"),
            tiles_arguments=", ".join([*start, "counts", "order", "t", "others", "queries", "keys", "by_keys", "most"]),
            listing=f"list_tiles({', '.join(listing)}, t",
            diagonals=tuple((reading, self._diagonals(reading)[0]) for reading in self.strips if self.backward),
            classes=_deeper(*starts, *self.lines.bounds, self.lines.some, self.lines.every),
            mixed=_deeper(
                *self.lines.convert("fi", "fj", "fh"),
                *self._start("begin + i"),
                *(line for reading in readings if reading.per_head for line in reading.first()),
                *self.lines.scores(True),
            ),
            located=tuple(
                reading for reading in readings if reading.located and (self.backward or not reading.per_head)
            ),
            helpers=self._helpers(),
            entries=MOST_ENTRIES,
            body=f"triton/scored_attention_{'backward' if self.backward else 'forward'}.jinja",
            kernels=tuple(kernel for kernel, _ in kernels),
            arguments=tuple(arguments for _, arguments in kernels),
            queries=f"(i < T){self.inside}" if self.inside else "i < T",
            keys=f"(j < T){self.inside}" if self.inside else "j < T",
            key_rows=f"(key[:, None] < T){self.inside}" if self.inside else "key[:, None] < T",
            rows=f"(query[:, None] < T){self.inside}" if self.inside else "query[:, None] < T",
            positions=(*self.lines.convert("fi", "fh"), *self._start("at"), *firsts),
            row="b * tl.num_programs(0) + tile" if start else "tile",
            parts=tuple(self._part(masked) for masked in (False, True)),
            key_parts=tuple(self._key_part(masked) for masked in (False, True)),
            element=self.element,
            slope=f"(ds * ({self.lines.slope}))" if self.lines.slope else "ds",
            finish=SINK if self.op.sinks else NO_SINK,
            sums_begin=(
                *self._error()[:1],
                *(line for reading in self.by_queries for line in reading.begin_sums(self.exact)),
            ),
            sums_end=(*self._error()[1:], *(reading.end_sums(self.exact) for reading in self.by_queries)),
            key_sums_begin=tuple(line for reading in self.general for line in reading.begin_sums(self.exact)),
            key_sums_end=tuple(reading.end_sums(self.exact) for reading in self.general),
            delta="delta + error" if self.exact else "delta",
            prepared=self._prepared(),
            summed=self._summed(),
            wanted=self.checks(),
            allocated=tuple(f"{name} = {self._empty(name, type)}" for name, type in self.outputs.items()),
            returns=", ".join(self.outputs),
            fake=self.fake(),
        )

    def _error(self) -> list[str]:
        """Returns the lines that compute the rounding error of delta, the sum of dy * y over channels.

        Without rounding of y, the sum of p * (dy v^T) over the keys equals delta. The sum of p * (dy v^T - delta) is
        therefore the error. The gradient of a table is a sum over many pairs, so it needs a correction of this error.
        """
        if not self.exact:
            return []
        lines = ["rest = tl.zeros((QUERIES,), tl.float32)"]
        if not self.op.sinks:
            return [*lines, "error = rest  # of delta, by the rounding of y"]
        sink = "tl.load(sinks_ptr + h).to(tl.float32) * LOG2E"
        return [
            *lines,
            f"sink = {sink}",
            "error = rest - delta * tl.exp2(sink - lse)  # of delta, by the rounding of y",
        ]

    def _helpers(self) -> tuple[str, ...]:
        names = (("tanh", bool(self.lines.calls)), ("sums", self.backward and bool(self.general)))
        return tuple(f"triton/scored_attention_{name}.jinja" for name, used in names if used)

    def function(self, by: str) -> GeneratedFunction:
        """Returns the description of the generated function. The summary of the function ends with `by`, such as
        "tiles of scores"."""
        values = self.inputs | self.outputs
        shapes = {
            name: f"[{', '.join(self._shape(name, type, *'BT', self.heads, self.kv_heads, self.channels))}]"
            for name, type in values.items()
        }
        summary = f"{self.site.label}: {self.site.node.op.words}, by {by}."
        return generated_function(self.site, self.inputs, self.outputs, shapes, summary, self._formulas())

    def _formulas(self) -> list[str]:
        score, scale = self.op.score, "" if self._scale() == 1 else f"{self._scale():.6g} "
        lines = [f"s = {scale}q k^T for the query at i and the key at j", f"x = {score} where {self.op.mask}"]
        if self.op.documents:
            lines.append("start is the position at which the document of a query starts")
        denominator = "sum(exp(x)) + exp(sinks)" if self.op.sinks else "sum(exp(x))"
        if self.backward:
            lines += ["p = exp(x - lse), dv = p^T dy", "dx = p * (dy v^T - sum(dy * y)), ds = dx * (dx / ds)"]
            lines += [f"dq = {scale}ds k, dk = {scale}ds^T q"]
        else:
            lines += [f"lse = log({denominator}), y = exp(x - lse) v"]
        shared = self.heads // self.kv_heads
        return lines + ([f"{shared} heads of queries read one of keys and values"] if shared > 1 else [])

    def _how(self) -> str:
        words = f"Triton kernels for {self.site.target.name}. Tiles of scores that are all masked are not computed;"
        words += (
            " tiles of which none is masked are computed without the mask. Sums are fp32, weights are rounded before"
        )
        words += " they are multiplied with. Called again, it gives the same bits."
        return flowed(words)

    def _scale(self) -> float:
        return self.channels**-0.5 if self.op.scale is None else self.op.scale

    def _shape(self, name: str, type: TensorType, b: str, t: str, *counts: object) -> tuple[str, ...]:
        heads, kv_heads, channels = map(str, counts or ("H", "G", "C"))
        if name == "lse":
            return b, heads, t
        if name == "start":
            return b, t
        if name in ("k", "v", "dk", "dv"):
            return b, t, kv_heads, channels
        if name in ("q", "y", "dy", "dq"):
            return b, t, heads, channels
        return tuple(map(str, type.shape))

    def checks(self) -> tuple[str, ...]:
        shapes = {name: self._shape(name, type, "b", "t") for name, type in self.inputs.items()}
        return tuple(
            f'("{name}", {name}, ({", ".join(shape)}{"," if len(shape) == 1 else ""}), {DTYPES[type.dtype]}),'
            for (name, shape), type in zip(shapes.items(), self.inputs.values(), strict=True)
        )

    def _empty(self, name: str, type: TensorType, b: str = "b", t: str = "t") -> str:
        dtype = f", dtype={DTYPES[type.dtype]}" if type.dtype != self.inputs["q"].dtype else ""
        make = "q.new_empty" if name in ("y", "lse", "dq", "dk", "dv") else "q.new_zeros"
        return f"{make}({', '.join(self._shape(name, type, b, t))}{dtype})"

    def fake(self) -> str:
        values = [self._empty(name, type, "q.shape[0]", "q.shape[1]") for name, type in self.outputs.items()]
        text = f"return {', '.join(values)}"
        return text if len(text) <= INSIDE else listed("return (", values, ")", indent=4).lstrip()

    def _start(self, place: str) -> tuple[str, ...]:
        if not self.lines.documents:
            return ()
        return (f"start = tl.load(start_ptr + {place}, mask=i < T, other=0).to(tl.int32)",)

    def _part(self, masked: bool) -> Part:
        weights = "tl.exp2(x * LOG2E - lse[:, None])"
        inside = (
            [f"(key[:, None] < T){self.inside}" if self.inside else "key[:, None] < T"]
            if masked
            else ["c < C"]
            if self.inside
            else []
        )
        lines = (*self.lines.convert("fj"), *self.lines.scores(masked))
        return Part(
            comment="  # some pairs are masked" if masked else "  # no pair is masked",
            span="whole, some" if masked else "whole",
            tiles="",
            start="",
            keys=f", mask={inside[0]}, other=0.0" if inside else "",
            scores=(*lines, *(('x = tl.where(seen, x, float("-inf"))',) if masked and not self.backward else ())),
            base='tl.where(top == float("-inf"), 0.0, top)' if masked else "top",
            weights=f"tl.where(seen, {weights}, 0.0)" if masked else weights,
            sums=(
                *(["rest += tl.sum(ds, 1)"] if self.exact else []),
                *(line for reading in self.by_queries for line in reading.add_sums(masked, self.exact)),
            ),
        )

    def _key_part(self, masked: bool) -> Part:
        weights = "tl.exp2(x * LOG2E - lse[None, :])"
        begin = [*self.lines.convert("fi", "fj", "fh"), *(self._start("begin + i") if masked else ())]
        begin += [line for reading in self.lines.readings for line in reading.first(by_keys=True)]
        return Part(
            comment="  # some pairs are masked" if masked else "  # no pair is masked",
            span="",
            tiles="some - whole" if masked else "whole",
            start="whole + " if masked else "",
            keys="",
            scores=(*begin, *self.lines.scores(masked, by_keys=True)),
            base="",
            weights=f"tl.where(seen, {weights}, 0.0)" if masked else weights,
            sums=tuple(line for reading in self.general for line in reading.add_sums(masked, self.exact)),
        )

    def _forward_kernel(self) -> tuple[str, str]:
        read = ["q", "k", "v", *self._read(), *(["sinks"] if self.op.sinks else [])]
        return self._kernel("forward", [*read, "y", "lse", *LISTS], [], "")

    def _queries_kernel(self) -> tuple[str, str]:
        sums = [f"{reading.name}_sums" for reading in self.by_queries]
        sinks = ["sinks"] if self.op.sinks and self.exact else []
        tensors = ["dy", "q", "k", "v", "y", "lse", *self._read(), *sinks, "dq", "delta", *sums, *LISTS]
        return self._kernel("queries", tensors, [], "DQ_")

    def _keys_kernel(self) -> tuple[str, str]:
        sums = [f"{reading.name}_sums" for reading in self.general]
        tensors = ["dy", "q", "k", "v", "lse", "delta", *self._read(by_keys=True), "dk", "dv", *sums, *LISTS]
        return self._kernel("keys", tensors, [], "DK_")

    def _diagonals(self, reading: Reading) -> tuple[str, list[str]]:
        name, room = f"{reading.name}_diagonals", f"{SPLITS}, H, 2, t"
        tensors = ["dy", "q", "k", "v", "lse", "delta", *self._read(), name]
        signature, arguments = self._kernel(name, tensors, [("B", "b")], "DQ_")
        launch = [
            f"{name} = q.new_zeros({room}, dtype=torch.float32)",
            f"{name}_kernel[(triton.cdiv(t, DQ_QUERIES), H, {SPLITS})](",
            f"{arguments}\n        num_warps=DQ_WARPS,\n        num_stages=DQ_STAGES,\n    )",
        ]
        return signature, launch

    def _read(self, by_keys: bool = False) -> list[str]:
        sources = (reading.source(by_keys) for reading in self.lines.readings)
        return [*(["start"] if self.lines.documents else []), *dict.fromkeys(sources)]

    def _kernel(self, name: str, tensors: list[str], sizes: list[tuple[str, str]], prefix: str) -> tuple[str, str]:
        sizes = [*sizes, ("T", "t"), *([("N", "order.shape[-1]")] if "order" in tensors else [])]
        sizes += [("STRIP", "strip")] if self.strips else []
        sizes += [(f"{tensor.upper()}_STRIDE", f"{tensor}.stride(0)") for tensor in "qkv"]
        names = [*(f"{tensor}_ptr" for tensor in tensors), *(size for size, _ in sizes)]
        arguments = [*tensors, *(value for _, value in sizes)]
        arguments += [prefix + name if name in ("QUERIES", "KEYS") else name for name in CONSTANTS]
        signature = listed(f"def {name}_kernel(", [*names, *(f"{name}: tl.constexpr" for name in CONSTANTS)], "):")
        return signature, flowed(f"{', '.join(map(unbroken, arguments))},", " " * 8)

    def _prepared(self) -> tuple[str, ...]:
        lines = [f"{name} = {name}.contiguous()" for name in self.further]
        if self.strips:
            lines.append(f"strip = triton.cdiv(t, 64) * 64 + {2 * NEAREST}")
        for reading in self.lines.readings:
            rows = ((False, "DQ_QUERIES"), (True, "DK_KEYS")) if self.backward else ((False, "QUERIES"),)
            lines += reading.strips(*rows) + (reading.sums() if self.backward else [])
        return tuple(lines)

    def _summed(self) -> tuple[str, ...]:
        lines = [f"d{table_name(name)}.zero_()" for name in self.op.tables]
        lines += [line for reading in self.strips for line in self._diagonals(reading)[1]]
        lines += [line for reading in self.lines.readings for line in reading.finish_sums()]
        if self.op.sinks:
            lines.append("dsinks.copy_(-(torch.exp(sinks.float()[:, None] - lse) * delta).sum((0, 2)))")
        return tuple(lines)
