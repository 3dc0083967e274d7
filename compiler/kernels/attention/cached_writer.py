"""Writes the context of the template for attention over a cache."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from specc.compiler.expr.mask import LANGUAGE, SAME, sees_later, window_of
from specc.compiler.expr.parse import reread
from specc.compiler.expr.spell import triton_text
from specc.compiler.expr.values import Logic
from specc.compiler.ir.types import DTYPES
from specc.compiler.kernels.attention.attention import table_name
from specc.compiler.kernels.attention.cached_context import (
    CachedContext,
    CachedTile,
    Loop,
    inputs_of,
    op_of,
    page_of,
    sizes_of,
)
from specc.compiler.kernels.attention.score_lines import Reading, ScoreLines
from specc.compiler.kernels.attention.score_tile import NARROWEST, block
from specc.compiler.kernels.attention.scored_context import LOG2E
from specc.compiler.kernels.gemm.rows import DEPENDENT_LAUNCH
from specc.compiler.kernels.generated import (
    TRITON_DTYPES,
    GeneratedFunction,
    constants,
    generated_function,
    number_of,
)
from specc.compiler.kernels.kernel import Site
from specc.compiler.kernels.lines import flowed, listed, nested, unbroken

MOST_ROWS = 64  # rows per program instance
SUMS = 128  # f32 sums per thread; a thread has 255 registers
# Bytes of partial sums that one program instance adds, for at most 16 rows. The read from the L2 cache takes about
# 0.6 us. The launch of another kernel would take more than 1 us.
JOINED_BYTES = 65_536
JOINED = 32  # partial sums that a thread loads at once; 64 would need too many registers
# Scales of values are multiplied by this factor, so that they are near 1 in 16-bit products; a power of two causes no
# rounding
UNIT = 256.0
LONGEST = 1 << 20  # positions, if the model states no context
PROMISE = """\
    On one GPU; a cache may have any strides, and is read in place if its positions have no gaps.
    Raises ValueError for other shapes or dtypes.
    \"\"\""""
JOIN = ("D", "ROWS", "CHANNELS", "BLOCK_P")  # constants of `join`
DECODE = ".to(tl.float8e4nv, bitcast=True).to({element})"


class Writer:
    """Writes the template context of one site. `chosen` maps the name of a constant of the tile to the variable of the
    launch function that replaces the constant."""

    chosen: Mapping[str, str] = MappingProxyType({})

    def __init__(self, site: Site, tile: CachedTile) -> None:
        self.site, self.tile, self.op, self.inputs = site, tile, op_of(site), inputs_of(site)
        q, k = self.inputs["q"], self.inputs["k"]
        self.heads, self.kv_heads = number_of(q.shape[-2]), number_of(k.shape[-2])
        self.channels, self.values = sizes_of(site)
        self.shared, self.page = self.op.values is not None, page_of(site)
        self.reused = self.shared and not self.op.coded
        self.ring = self.op.ring
        first = self.values if self.shared else self.channels
        self.width, self.columns = block(first), block(self.values)
        self.rest = self.channels - first
        self.padded = "" if self.width == first else f" & (c < {'D' if self.shared else 'C'})"
        self.element = TRITON_DTYPES[q.dtype]
        tables = tuple((name, tuple(map(number_of, self.inputs[table_name(name)].shape))) for name in self.op.tables)
        self.score, self.mask = self.op.parsed(self.heads)
        self.lines = ScoreLines.of(self.score, self.mask, tables)
        self.further = [name for name in self.inputs if name in ("start", "sinks") or name.endswith("_table")]
        self.stored = [name for name in self.inputs if name in ("k", "v", "k_scale", "v_scale")]
        self.new = [name for name in self.inputs if name.startswith("new_")]

    def context(self) -> CachedContext:
        kernel, arguments = self._kernel()
        join_kernel, join_arguments = self._join_kernel()
        finishing, joining = self._joining()
        function = self._function()
        return CachedContext(
            op=function,
            how=self._how(),
            heads=self.heads,
            kv_heads=self.kv_heads,
            channels=self.channels,
            values=self.values,
            settings=self._settings(),
            helpers=self._helpers(),
            pdl=self.site.target.arch >= DEPENDENT_LAUNCH,
            finish=listed("def finish(", [*finishing, "D: tl.constexpr"], "):"),
            join=listed("def join(", [*joining, *(f"{word}: tl.constexpr" for word in JOIN)], "):"),
            kernel=kernel,
            join_kernel=join_kernel,
            finish_lines=self._finish_lines(),
            finish_block=self._call("finish", finishing, {"row": "query * H + h"}, ["D"], 8),
            finish_joined=self._call("finish", finishing, {}, ["D"], 4),
            join_block=self._call(
                "join",
                joining,
                {"row": "joined", "h": "head", "there": "token < T"},
                ["D", "JOINED", "VALUES", "BLOCK_P"],
                16,
            ),
            join_row=self._call(
                "join", joining, {"h": "row % H", "there": "row >= 0"}, ["D", "1", "CHANNELS", "BLOCK_P"], 4
            ),
            begin=f"tl.load(positions_ptr{' + b * T' if self.page else ''}).to(tl.int32)",
            bounds=self._bounds(),
            queries=self._queries(),
            shared=self.shared,
            reused=self.reused,
            rest=bool(self.rest),
            positions=self._positions(),
            new_token=(),
            tiles=self._tiles(),
            loops=self._loops(),
            key_mask=f"inside[:, None]{self.padded}",
            value_mask=f"inside[:, None]{self._inside}",
            other="0" if self.op.coded else "0.0",
            decode=self._decode,
            weights=self._weights,
            unit=f"{1 / UNIT!r}" if self.op.coded else "1.0",
            inside=self._inside,
            element=self.element,
            stored=TRITON_DTYPES[self.site.node.type.dtype],
            sizes=self._sizes(launched=False),
            launched_sizes=self._sizes(launched=True),
            prepared=self._prepared(),
            most_parts=self._most_parts(),
            chosen=(),
            arguments=arguments,
            join_arguments=join_arguments,
            wanted=self._checks(),
            options="num_warps=WARPS, num_stages=STAGES, launch_pdl=PDL,",
            written="",
            custom_op=function.signature,
            fake=function.fake_signature,
            registered=function.function,
            promise=f"{function.promise}\n\n{PROMISE}",
        )

    def _helpers(self) -> tuple[str, ...]:
        return ("triton/scored_attention_tanh.jinja",) if self.lines.calls else ()

    def _queries(self) -> tuple[str, ...]:
        row = "q_ptr + (query * H + h) * C"
        lines = [f"q = tl.load({row} + c, mask=there{self.padded}, other=0.0)"]
        if self.rest:
            lines.append("r = tl.arange(0, REST)[None, :]")
            lines.append(f"q_rest = tl.load({row} + D + r, mask=there & (r < C - D), other=0.0)")
        return tuple(lines)

    @property
    def _inside(self) -> str:
        return "" if self.columns == self.values else " & (d < D)"

    @property
    def _scale_of_values(self) -> str:
        return "k_scale" if self.shared else "v_scale"

    @property
    def _decode(self) -> str:
        return DECODE.format(element=self.element) if self.op.coded else ""

    @property
    def _weights(self) -> str:
        return f"(p * ({self._scale_of_values} * {UNIT})[None, :])" if self.op.coded else "p"

    @property
    def _scale(self) -> float:
        return self.channels**-0.5 if self.op.scale is None else self.op.scale

    def _settings(self) -> tuple[str, ...]:
        tile = {"KEYS": self.tile.keys, "WARPS": self.tile.warps, "STAGES": self.tile.stages}
        most = min(MOST_ROWS, max(NARROWEST, SUMS * 32 * self.tile.warps // self.columns))
        sizes = {"WIDTH": self.width, "VALUES": self.columns, **({"REST": block(self.rest)} if self.rest else {})}
        sizes |= {"PAGE": self.page} if self.page else {}
        return (
            constants(tile | {"PROGRAMS": self.tile.programs, "MOST_ROWS": most}),
            constants(sizes),
            constants({"JOINED_BYTES": JOINED_BYTES, "JOINED_TILE": JOINED * 32 * self.tile.warps}),
            f"SCALE, LOG2E = {self._scale!r}, tl.constexpr({LOG2E})",
        )

    def _words(self) -> list[str]:
        words = ["H", "G", "C", "D", "SCALE", "KEYS", "WIDTH", "VALUES"]
        return [*words, *(["REST"] if self.rest else []), *(["PAGE"] if self.page else [])]

    def _kernel(self) -> tuple[str, str]:
        again = [] if self.reused or not self.shared else ["k", "new_k"] if self.new else ["k"]
        tensors = [*self.inputs, *(name.replace("k", "v") for name in again), "y"]
        sizes = [("T", "t"), ("PARTS", "parts"), ("APART", "apart"), *([("N", "n")] if self.page else [])]
        words = self._words()
        names = [*(f"{name}_ptr" for name in (*tensors, "parts", "sums", "counts")), *(size for size, _ in sizes)]
        constant = [f"{name}: tl.constexpr" for name in (*words, "ROWS", "PARTIAL", "JOINED", "BLOCK_P", "PDL")]
        arguments = [
            *self.inputs,
            *again,
            "y",
            "partial",
            "sums",
            "count",
            *(value for _, value in sizes),
            *(self.chosen.get(word, word) for word in words),
            *("row_tile", "parts > 1", "joined", "block", "PDL"),
        ]
        return (
            listed(f"def {self._symbol}_kernel(", [*names, *constant], "):"),
            flowed(f"{', '.join(map(unbroken, arguments))},", " " * 8),
        )

    def _join_kernel(self) -> tuple[str, str]:
        tensors = ["y", "parts", "sums", *self._sinks]
        words = ["H", "D", "CHANNELS", "BLOCK_P", "PDL"]
        constant = [f"{name}: tl.constexpr" for name in words]
        arguments = ["y", "partial", "sums", *self._sinks, "parts", "H", "D", "channels", "block", "PDL"]
        return (
            listed("def join_kernel(", [*(f"{name}_ptr" for name in tensors), "PARTS", *constant], "):"),
            f"{' ' * 12}{', '.join(arguments)},",
        )

    def _joining(self) -> tuple[list[str], list[str]]:
        sinks = [f"{name}_ptr" for name in self._sinks]
        row = [*sinks, "row", *(["h"] if sinks else []), "there", "d"]
        return ["y_ptr", *row, "most", "total", "y"], ["y_ptr", "parts_ptr", "sums_ptr", *row, "PARTS"]

    def _call(
        self, name: str, names: Sequence[str], given: dict[str, str], constants: Sequence[str], indent: int
    ) -> str:
        return listed(f"{name}(", [*(given.get(n, n) for n in names), *constants], ")", indent, last="").lstrip()

    @property
    def _sinks(self) -> list[str]:
        return ["sinks"] if self.op.sinks else []

    @property
    def _symbol(self) -> str:
        return self.op.symbol(self.site.inputs)[0]

    def _positions(self) -> tuple[str, ...]:
        lines = [*self.lines.convert("fi", "fh")]
        if self.lines.documents:
            lines.append("start = tl.load(start_ptr + query, mask=there, other=0).to(tl.int32)")
        return *lines, *(line for reading in self.lines.readings for line in reading.first() if reading.per_head)

    def _bounds(self) -> tuple[str, ...]:
        known = {
            "i0": "begin + first",
            "last": "tl.minimum((tile * ROWS + ROWS - 1) // (H // G), T - 1)",
            "first": "tile * ROWS // (H // G)",
        }
        loops = (line for loop in self._loops() for line in (loop.span, *loop.keys, *loop.scores))
        text, lines = "\n".join((*self._positions(), *self._tiles(), *loops)), list[str]()
        for name, value in known.items():
            if re.search(rf"\b{name}\b", text):
                lines.insert(0, f"{name} = {value}")
                text += f"\n{value}\n"
        return tuple(lines)

    def _window(self) -> tuple[int, int] | None:
        return window_of(self.op.mask, self.heads, self.site.context or LONGEST)

    def _tiles(self) -> tuple[str, ...]:
        """Returns the lines that compute how many tiles of keys a block of queries visits.

        In a ring buffer, the tiles of stored rows come before the tiles of new rows. In other caches, the lines do not
        count tiles that the mask hides.
        """
        if self.ring is not None:
            return (
                f"held = tl.minimum(begin, {sum(self.ring)})",
                "old = tl.cdiv(held, KEYS)",
                "tiles = old + tl.cdiv(last + 1, KEYS)",
            )
        end = "begin + T" if sees_later(self.op.mask, self.heads) else "begin + last + 1"
        lines, window, lows = [f"end = {end}"], self._window(), []
        condition = reread(self.op.mask, LANGUAGE)
        parts = condition.parts if isinstance(condition, Logic) and condition.op == "and" else (condition,)
        first = window[0] if window is not None else 0
        if window is not None:
            lows.append(f"(i0 - {window[1] - 1}) // KEYS")
        if SAME in parts and not first:
            lines.append("start0 = tl.load(start_ptr + b.to(tl.int64) * T + first).to(tl.int32)")
            lows.append("start0 // KEYS")
        if not lows:
            return (*lines, "tiles = tl.cdiv(end, KEYS)")
        low = str(-(-first // self.tile.keys))
        for text in lows:
            low = f"tl.maximum({text}, {low})"
        lines.append(f"low = {low}")
        if not first:
            return (*lines, "tiles = tl.cdiv(end, KEYS) - low")
        lines.append(f"prefix = tl.minimum(tl.cdiv(end, KEYS), {-(-first // self.tile.keys)})")
        return (*lines, "tiles = prefix + tl.maximum(tl.cdiv(end, KEYS) - low, 0)")

    def _loops(self) -> tuple[Loop, ...]:
        start, stop = "part * share", "tl.minimum(part * share + share, tiles)"
        if self.ring is not None:
            first, window = self.ring
            before = f"begin - 1 - (begin - 1 - slot) % {window}"
            before = f"tl.where(slot < {first}, slot, {before})" if first else before
            old = ("slot = n * KEYS + tl.arange(0, KEYS)", "inside = slot < held", f"j = ({before})[None, :]")
            new = (
                "slot = (n - old) * KEYS + tl.arange(0, KEYS)",
                "inside = slot <= last",
                "j = (begin + slot)[None, :]",
            )
            rows = ("at = (b.to(tl.int64) * APART + slot) * G + g", "at = (b.to(tl.int64) * T + slot) * G + g")
            return (
                self._loop(f"{start}, tl.minimum(part * share + share, old)", (*old, rows[0])),
                self._loop(f"tl.maximum({start}, old), {stop}", (*new, rows[1]), "new_"),
            )
        tiles, place = self._tiles(), "n * KEYS"
        if any(line.startswith("prefix") for line in tiles):
            place = "tl.where(n < prefix, n, low + n - prefix) * KEYS"
        elif any(line.startswith("low") for line in tiles):
            place = "(low + n) * KEYS"
        lines = [f"slot = {place} + tl.arange(0, KEYS)", "inside = slot < end", "j = slot[None, :]"]
        row = "b.to(tl.int64) * APART + slot"
        if self.page:
            row = "page * APART + slot % PAGE"
            whole = self.page % self.tile.keys == 0  # each tile lies within one page
            at = f"{place} // PAGE)" if whole else "slot // PAGE, mask=inside, other=0)"
            lines.append(f"page = tl.load(table_ptr + b.to(tl.int64) * N + {at}")
        return (self._loop(f"{start}, {stop}", (*lines, f"at = ({row}) * G + g")),)

    def _loop(self, span: str, keys: Sequence[str], new: str = "") -> Loop:
        lines = ["s = s * SCALE"]
        if self.op.coded:
            names = ("k_scale",) if self.shared else ("k_scale", "v_scale")
            lines = [f"{name} = tl.load({new}{name}_ptr + at, mask=inside, other=0.0)" for name in names]
            lines.append("s = s * (k_scale * SCALE)[None, :]")
        return Loop(span, (*keys, *self.lines.convert("fj")), (*lines, *self._masked("inside[None, :]")), new)

    def _masked(self, there: str) -> tuple[str, ...]:
        return (
            nested("seen", f"({self.lines.mask}) & {there}", 8),
            *(self._load(reading) for reading in self.lines.readings if not reading.per_head),
            *(nested(*call, 8) for call in self.lines.calls),
            nested("x", f'tl.where(seen, {self.lines.value}, float("-inf"))', 8),
        )

    def _load(self, reading: Reading) -> str:
        place = f"{reading.table}_table_ptr + {triton_text(reading.index, whole=True)}"
        return nested(reading.name, f"tl.load({place}, mask=seen, other=0.0).to(tl.float32)", 8)

    def _finish_lines(self) -> tuple[str, ...]:
        if not self.op.sinks:
            return ("total = tl.where(total == 0.0, 1.0, total)  # of a query that sees no key",)
        return (
            "sink = tl.load(sinks_ptr + h).to(tl.float32) * LOG2E",
            "base = tl.maximum(most, sink)",
            "shrink = tl.exp2(most - base)",
            "total, y = total * shrink + tl.exp2(sink - base), y * shrink",
        )

    def _sizes(self, launched: bool) -> tuple[str, ...]:
        if not self.page:
            tiles = ("tiles = triton.cdiv(s, KEYS) + triton.cdiv(t, KEYS)",)
            return ("(b, t), s = q.shape[:2], k.shape[1]", *(tiles if launched and self.ring is not None else ()))
        if launched:
            return ("b, n = table.shape", "t = q.shape[1] // b")
        return ("(b, n), s = table.shape, len(k)", "t = q.shape[1] // max(b, 1)")

    def _prepared(self) -> tuple[str, ...]:
        lines = [f"{name} = {name}.contiguous()" for name in self.further]
        lines += ["table = table.contiguous()"] if self.page else []
        names = f"({', '.join(self.stored)}{',' if len(self.stored) == 1 else ''})"
        lines += [f"{name} = {name}.contiguous()" for name in self.new]
        return (*lines, f"apart, {names} = rows({', '.join(self.stored)})")

    def _most_parts(self) -> str:
        keys = "n * PAGE" if self.page else "s"
        if self.ring is not None:
            return "tiles"
        if (window := self._window()) is not None:
            keys = f"min({keys}, {sum(window) + 2 * self.tile.keys} + t)"
        return f"triton.cdiv({keys}, KEYS)"

    def _shape(self, name: str, launched: Sequence[str]) -> tuple[str, ...]:
        b, t, s, n, h, g, c, d = launched
        packed = (b, t) if not self.page else ("1", f"{b} * {t}")
        stored = (b, s) if not self.page else (s, "PAGE")
        if name in ("q", "y"):
            return *packed, h, c if name == "q" else d
        rows = packed if name.startswith("new_") else stored
        if name.removeprefix("new_") in ("k", "v"):
            return *rows, g, c if name.endswith("k") else d
        if name.endswith("_scale"):
            return *rows, g, "1"
        known = {"positions": (f"{b} * {t}",) if self.page else (t,), "table": (b, n), "start": packed}
        return known.get(name) or tuple(map(str, self.inputs[name].shape))

    def _checks(self) -> tuple[str, ...]:
        names = ("b", "t", "s", "n", "H", "G", "C", "D")
        shapes = {name: self._shape(name, names) for name in self.inputs}
        return tuple(
            f'("{name}", {name}, ({", ".join(shape)}{"," if len(shape) == 1 else ""}), {DTYPES[type.dtype]}),'
            for (name, shape), type in zip(shapes.items(), self.inputs.values(), strict=True)
        )

    def _function(self) -> GeneratedFunction:
        outputs = {"y": self.site.node.type}
        heads = map(str, (self.heads, self.kv_heads, self.channels, self.values))
        names = ("R", "K", "P", "N", *heads) if self.page else ("B", "T", "S", "N", *heads)
        shapes = {
            name: f"[{', '.join(self._shape(name, names))}]".replace("PAGE", str(self.page))
            for name in (*self.inputs, *outputs)
        }
        summary = f"{self.site.label}: {self.site.node.op.words}, by ranges of keys."
        return generated_function(self.site, self.inputs, outputs, shapes, summary, self._formulas())

    def _formulas(self) -> list[str]:
        scale = "" if self._scale == 1 else f"{self._scale:.6g} "
        lines = [f"s = {scale}q k^T for the query at i and the key at j", f"x = {self.op.score} where {self.op.mask}"]
        if self.op.documents:
            lines.append("start is the position at which the document of a query starts")
        lines.append(f"y = exp(x) v / ({'sum(exp(x)) + exp(sinks)' if self.op.sinks else 'sum(exp(x))'})")
        if self.shared:
            lines.append(f"the first {self.values} channels of a key are its value")
        if self.op.coded:
            lines.append("k and v are e4m3 codes times the scale of their position and head")
        if self.ring is not None:
            first, window = self.ring
            held = f"the first {first} positions and " if first else ""
            lines.append(
                f"k and v are a ring of {held}{window} positions before the queries, then those of the queries"
            )
        shared = self.heads // self.kv_heads
        return lines + ([f"{shared} heads of queries read one of keys and values"] if shared > 1 else [])

    def _how(self) -> str:
        words = (
            f"Triton kernels for {self.site.target.name}. A program reads a range of the keys that its queries may see;"
        )
        words += (
            " the last program of a text and key head adds the ranges, or a second kernel if they are many. Positions"
        )
        words += " are read on the device. Sums are fp32, weights"
        words += " are rounded before they are multiplied with. Called again with tensors of the same shapes, it gives"
        words += " the same bits."
        return flowed(words)
