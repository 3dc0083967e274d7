"""Triton code of scores, masks and table reads, for a tile of queries and keys.

These names occur in the kernels:

- i, j: the int32 positions of the queries and keys of a tile
- i0, j0: the first query position and the first key position of a tile
- h: the head of a tile
- s: the product q k^T, scaled
- seen: the condition that a query-key pair is not masked
- fi, fj, fh: i, j and h in fp32

Each position is converted to fp32 once. A conversion per score would take as long as the exponential.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache, reduce
from typing import NamedTuple

from specc.compiler.expr.interval import bounds, over_tile
from specc.compiler.expr.mask import Mask
from specc.compiler.expr.positional import whole_function
from specc.compiler.expr.score import Score, TableRead
from specc.compiler.expr.simplify import simplify
from specc.compiler.expr.spell import triton_text
from specc.compiler.expr.traverse import rebuild, substitute, variables
from specc.compiler.expr.values import Binary, Call, Const, Expr, Var
from specc.compiler.kernels.lines import nested
from specc.compiler.records import record

FLOATS = {"i": "fi", "j": "fj", "h": "fh"}
CORNER = {"i": "i0", "j": "j0"}
NEAREST = 256  # in a computed tile, no key is this many positions or more after its query
DIFFERENCE = {"i": Var("j") + Var("d")}


@record
class Reading:
    """A read of a learned table by a score. Each score reads one element. The index of the element is an expression of
    the query position i, the key position j and the head h.

    There are three kinds of reads. If the index depends only on the head, the kernel loads the element once per head.
    If the index depends on the head and on i - j, the kernel reads a strip. A strip is a copy of the table, in the
    order in which a row of tiles reads the elements. For a tile whose scores all read the same element, the kernel does
    not read the strip. With any other index, the kernel loads an element per score.

    Attributes:
        name: The name of the element in the score.
        table: The name of the table.
        size: The number of elements of the table.
        indices: One index expression per dim, in the variables i, j and h.
        index: The flat index of the element, as an expression in i, j and h.
        slope: The derivative of the score with respect to the element, as Triton code.
    """

    name: str
    table: str
    size: int
    indices: tuple[Expr, ...]
    index: Expr
    slope: str

    @property
    def per_head(self) -> bool:
        return not {"i", "j"} & set(variables(self.index))

    @property
    def distance(self) -> Expr | None:
        """The flat index of the element in terms of the head h and the distance d = i - j. The result is None if the
        index does not depend on d, or depends on i or j in another way than through d."""
        return None if self.per_head else by_distance(self.index)

    @property
    def located(self) -> str:
        """The line that computes the flat index of the element from the distance d = i - j and the head h. The text is
        empty if the index depends on i or j in another way than through i - j."""
        if self.general:
            return ""
        place = self.index if self.distance is None else substitute(self.distance, {"d": Var("i")})
        text = f"{triton_text(place, {'i': 'd'}, whole=True)} + 0 * d"
        return nested("index", f"tl.minimum(tl.maximum({text}, 0), {self.size - 1})")

    @property
    def general(self) -> bool:
        """Whether the index depends on i or j in another way than through i - j."""
        return not self.per_head and self.distance is None

    def source(self, by_keys: bool = False) -> str:
        """Returns the name of the tensor from which a kernel loads elements: a strip if the index depends on i - j,
        otherwise the table. One strip is for the kernel that computes dk and dv (`by_keys`). The other strip is for the
        remaining kernels."""
        if self.distance is None:
            return f"{self.table}_table"
        return f"{self.name}_by_keys" if by_keys else f"{self.name}_by_queries"

    def first(self, by_keys: bool = False) -> list[str]:
        """Returns the lines with which a kernel loads one element for many scores of a head. If the index depends only
        on the head, all scores of the head read this element. If the index depends on i - j, all query-key pairs with a
        large i - j read this element. The result is empty for other indices. `by_keys` selects the kernel that computes
        dk and dv."""
        if self.per_head:
            return [self._load(self.name, triton_text(self.index, whole=True))]
        if self.distance is None:
            return []
        place = f"h * QUERIES * STRIP + (STRIP - {2 * NEAREST} - T + 1)"
        if by_keys:
            place = f"h * KEYS * STRIP + ({NEAREST} + T - 1)"
        return [self._load(f"{self.name}_far", place, by_keys)]

    def load(self, masked: bool, by_keys: bool = False) -> list[str]:
        """Returns the lines that load one table element per score of a tile. `masked` is False for tiles without masked
        pairs whose scores all read the same element. For such a tile, the lines load only this element. `by_keys`
        selects the kernel that computes dk and dv."""
        if self.per_head:
            return []
        if self.distance is None:
            return [self._load(self.name, self._place(masked), seen=", mask=seen, other=0.0" if masked else "")]
        if not masked:
            return [f"{self.name} = {self.name}_far"]
        place = f"h * QUERIES * STRIP + ((i - i0) * STRIP + (STRIP - {2 * NEAREST} + j0 - i0) + (j - j0))"
        if by_keys:
            place = f"h * KEYS * STRIP + ((j - j0) * STRIP + ({NEAREST} + i0 - j0) + (i - i0))"
        return [self._load(self.name, place, by_keys)]

    def _load(self, name: str, place: str, by_keys: bool = False, seen: str = "") -> str:
        return nested(name, f"tl.load({self.source(by_keys)}_ptr + {place}{seen}).to(tl.float32)", 8)

    def _place(self, masked: bool) -> str:
        return triton_text(self.index, {} if masked else CORNER, whole=True)

    def uniform(self) -> tuple[list[str], list[str]]:
        """Returns two lists. One list has the lines that compute bounds of the index in a tile. The other list has the
        conditions under which all scores of the tile read the same element.

        If the index depends on i - j, the conditions also require that the most distant query-key pair of the sequence
        reads this element.
        """
        lines, conditions = [], []
        for place, index in enumerate(self.indices):
            if not {"i", "j"} & set(variables(index)):
                continue
            if "h" in variables(index):
                return [], ["False"]
            name = f"{self.name}_{place}"
            for end, expr in zip(("low", "high"), bounds(index), strict=True):
                lines.append(nested(f"{name}_{end}", triton_text(over_tile(expr), whole=True)))
            conditions.append(f"({name}_low == {name}_high)")
            if self.distance is not None:
                far = by_distance(index)
                assert far is not None
                text = triton_text(substitute(far, {"d": Var("i")}), {"i": "T - 1"}, whole=True)
                lines.append(nested(f"{name}_far", text))
                conditions.append(f"({name}_high == {name}_far)")
        return lines, conditions

    def strips(self, *rows: tuple[bool, str]) -> list[str]:
        """Returns the lines that allocate and fill the strips. Each argument in `rows` describes the strip of one
        kernel: whether the kernel's rows of tiles belong to blocks of keys, and the name of the constant that holds the
        size of such a block."""
        lines = []
        for by_keys, count in rows if self.distance is not None else ():
            name, zero = self.source(by_keys), f"{NEAREST}, -1" if by_keys else f"strip - {2 * NEAREST}, 1"
            grid = f"(triton.cdiv(strip, 1024), {count}, H)"
            lines.append(f"{name} = q.new_empty(H, {count}, strip)")
            lines.append(f"{self.name}_kernel[{grid}]({self.table}_table, {name}, strip, {zero}, 1024)")
        return lines

    def sums(self) -> list[str]:
        """Returns the lines that allocate the partial sums of the table's gradient. If the index depends only on the
        head and on i - j, the lines also compute the table index of each sum."""
        name, tiles = f"{self.name}_sums", "triton.cdiv(t, DQ_QUERIES)"
        if self.general:
            return [f"{name} = q.new_empty(b, G, triton.cdiv(t, DK_KEYS), {self.size}, dtype=torch.float32)"]
        count = "t" if self.distance is not None else "1"
        return [
            f"{name} = q.new_empty(b, H, {tiles}, dtype=torch.float32)",
            f"{self.name}_index = q.new_empty(H, {count}, dtype=torch.int64)",
            f"places = torch.arange({self.size}, device=q.device)",
            f"{self.name}_kernel[(triton.cdiv({count}, 1024), 1, H)](places, {self.name}_index, {count}, 0, -1, 1024)",
        ]

    def begin_sums(self, exact: bool) -> list[str]:
        """Returns the lines that set the sums of a row of tiles to 0. For a read that is `general`, a row of tiles
        belongs to a block of keys. For any other read, a row of tiles belongs to a block of queries. With `exact`, a
        read that is not `general` also has a sum that corrects rounding errors."""
        name, row = f"{self.name}_sums", "(b.to(tl.int64) * G + g)" if self.general else "(b.to(tl.int64) * H + h)"
        size = f" * {self.size}" if self.general else ""
        place = f"{self.name}_place = {name}_ptr + ({row} * tl.num_programs(0) + tile){size}"
        if not self.general:
            zeros = "tl.zeros((QUERIES,), tl.float32)"
            lines = [place, f"{name} = {zeros}", f"{self.name}_weights = {zeros}"]
            return lines if exact else lines[:2]
        entries = 1 << (self.size - 1).bit_length()
        return [place, f"{self.name}_entries = tl.arange(0, {entries})", f"{name} = tl.zeros(({entries},), tl.float32)"]

    @property
    def gradient(self) -> str:
        """The gradient of the loss with respect to the table element, as an expression."""
        return "ds" if self.slope == "1.0" else f"ds * ({self.slope})"

    def add_sums(self, masked: bool, exact: bool) -> list[str]:
        """Returns the lines that add the gradients of a tile to the sums. `masked` states whether some pairs of the
        tile are masked. With `exact`, the lines also sum a correction for rounding errors. If the index depends on
        i - j, another kernel sums the tiles with masked pairs, and this function returns no lines for such tiles."""
        sums, entries = f"{self.name}_sums", f"{self.name}_entries"
        if self.general and masked:
            return [f"{sums} += sums_by_index({self.gradient}, {self._place(True)}, seen, {entries})"]
        if self.general:
            return [f"{sums} += tl.where({entries} == {self._place(False)}, tl.sum({self.gradient}), 0.0)"]
        if self.distance is not None and masked:
            return []
        weights = "p" if self.slope == "1.0" else f"p * ({self.slope})"
        lines = [f"{sums} += tl.sum({self.gradient}, 1)", f"{self.name}_weights += tl.sum({weights}, 1)"]
        return lines if exact else lines[:1]

    def end_sums(self, exact: bool) -> str:
        name, entries = f"{self.name}_sums", f"{self.name}_entries"
        if self.general:
            return f"tl.store({self.name}_place + {entries}, {name}, mask={entries} < {self.size})"
        error = f" - error * {self.name}_weights" if exact else ""
        return f"tl.store({self.name}_place, tl.sum({name}{error}))"

    def finish_sums(self) -> list[str]:
        """Returns the lines of the launch function that compute the gradient of the table. These lines run after the
        kernels, and add the partial sums of the kernels to the elements of the gradient."""
        grad, sums = f"d{self.table}_table", f"{self.name}_sums"
        if self.general:
            return [f"{grad} += {sums}.sum((0, 1, 2)).view({grad}.shape)"]
        put = f"{grad}.view(-1).index_put_(({self.name}_index,), totals, accumulate=True)"
        if self.per_head:
            return [f"totals = {sums}.sum((0, 2))[:, None]", put]
        return [f"totals = {self.name}_diagonals.sum((0, 2))", f"totals[:, -1] += {sums}.sum((0, 2))", put]


class ScoreLines(NamedTuple):
    """The Triton code of the score and the mask of one attention node.

    Attributes:
        calls: The function calls that the score and its derivatives share: the name of the variable for the result, and
            the call.
        value: The score, as an expression in s, positions and table elements.
        slope: The derivative of the score with respect to s, as an expression. Empty if the derivative is 1.
        mask: The condition that a query attends to a key, as an expression.
        some: The line that computes whether at least one pair of a tile is not masked, from the bounds of the tile.
        every: The line that computes whether no pair of a tile is masked and all scores read the same elements.
        bounds: The lines that define the variables that `every` reads.
        readings: The reads of tables.
        floats: The positions and heads that the code reads in fp32: the name of the fp32 variable, and the integer
            expression that is converted.
        documents: Whether the mask reads `start`, the first position of a token's document.
    """

    calls: tuple[tuple[str, str], ...]
    value: str
    slope: str
    mask: str
    some: str
    every: str
    bounds: tuple[str, ...]
    readings: tuple[Reading, ...]
    floats: Mapping[str, str]
    documents: bool

    @staticmethod
    @lru_cache(maxsize=256)
    def of(score: Score, mask: Mask, tables: tuple[tuple[str, tuple[int, ...]], ...]) -> "ScoreLines":
        """Returns the Triton code of a score and a mask. `tables` are the names of the tables with their shapes."""
        shapes = dict(tables)
        exprs = [score.value, score.slope, *score.slopes]
        relative = all(by_distance(expr) is not None for expr in exprs)
        calls: dict[Expr, str] = {}
        value, slope, *slopes = (_named(_floating(expr), calls) for expr in exprs)
        pairs = zip(score.reads, slopes, strict=True)
        readings = tuple(_reading(read, slope, shapes[read.table]) for read, slope in pairs)
        lines: list[str] = []
        conditions = [f"({triton_text(mask.all, whole=True)})"]
        for reading in readings:
            more, further = reading.uniform()
            lines, conditions = [*lines, *more], [*conditions, *further]
        read = {name for expr in (value, slope, *slopes, *calls) for name in variables(expr)}
        return ScoreLines(
            calls=tuple((name, f"tanh({triton_text(call)})") for call, name in calls.items()),
            value=triton_text(value),
            slope="" if slope == Const(1) else triton_text(slope),
            mask=triton_text(mask.condition, whole=True),
            some=nested("some", triton_text(mask.any, whole=True)),
            every=nested("every", " & ".join(conditions)),
            bounds=tuple(lines),
            readings=readings,
            floats={
                f"f{name}": f"({name} - i0)" if relative and name in "ij" else name
                for name in "ijh"
                if f"f{name}" in read
            },
            documents=mask.documents,
        )

    @property
    def plain(self) -> bool:
        """Whether the score is s, the scaled product, without changes."""
        return self.value == "s"

    @property
    def by_distance(self) -> tuple[Reading, ...]:
        """The reads whose index depends on i - j."""
        return tuple(reading for reading in self.readings if reading.distance is not None)

    def convert(self, *names: str) -> tuple[str, ...]:
        """Returns the lines that compute the fp32 positions `names`. Positions that the code does not read are left
        out."""
        return tuple(f"{name} = {self.floats[name]}.to(tl.float32)" for name in names if name in self.floats)

    def scores(self, masked: bool, by_keys: bool = False) -> tuple[str, ...]:
        """Returns the lines that compute the scores x of a tile, and with `masked` also the mask `seen`. `by_keys`
        selects the kernel that computes dk and dv."""
        mask = (nested("seen", self.mask, 8),) if masked else ()
        loads = (line for reading in self.readings for line in reading.load(masked, by_keys))
        return *mask, *loads, *(nested(*call, 8) for call in self.calls), nested("x", self.value, 8)


def by_distance(expr: Expr) -> Expr | None:
    """Rewrites an expression of i and j as an expression of d = i - j. Returns None if this is not possible."""
    moved = simplify(substitute(expr, DIFFERENCE))
    return None if "j" in variables(moved) else moved


def _reading(read: TableRead, slope: Expr, shape: tuple[int, ...]) -> Reading:
    steps = [reduce(lambda a, b: a * b, shape[place + 1 :], 1) for place in range(len(shape))]
    terms: Iterable[Expr] = (part * Const(step) for part, step in zip(read.indices, steps, strict=True))
    index = simplify(reduce(lambda a, b: a + b, terms))
    return Reading(
        read.variable, read.table, reduce(lambda a, b: a * b, shape, 1), read.indices, index, triton_text(slope)
    )


def _floating(expr: Expr) -> Expr:
    """Replaces the variables i, j and h by the names of their fp32 copies, except in integer subexpressions. Replaces
    divisions by a number by multiplications.

    A factor that is constant within a head, times (i - j), becomes two products: factor * i, computed once per query of
    a tile, and factor * j, computed once per key.
    """
    match expr:
        case Binary("//" | "%", _, _):
            return expr
        case Call(name, _) if whole_function(name):
            return expr
        case Binary("/", a, Const(value)):
            return _floating(a) * Const(1 / value)
        case Binary("+" | "-" as op, a, Binary("*", factor, Binary("-", Var("i"), Var("j")))) if not {
            "i",
            "j",
            "s",
        } & set(variables(factor)):
            first, second = _floating(factor) * Var("fi"), _floating(factor) * Var("fj")
            return _floating(a) - first + second if op == "-" else _floating(a) + first - second
        case Var(name):
            return Var(FLOATS.get(name, name))
    return rebuild(expr, _floating)


def _named(expr: Expr, calls: dict[Expr, str]) -> Expr:
    expr = rebuild(expr, lambda part: _named(part, calls))
    match expr:
        case Call("tanh", (argument,)):
            return Var(calls.setdefault(argument, f"tanh{len(calls)}"))
    return expr
