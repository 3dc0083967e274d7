"""The template context for attention of one new token per text. The kernel also rotates the query and key of the token,
and writes the key and value to the cache."""

from collections.abc import Sequence
from dataclasses import replace

from specc.compiler.kernels.attention.cached_context import CachedContext, CachedTile, Loop
from specc.compiler.kernels.attention.cached_writer import Writer
from specc.compiler.kernels.generated import GeneratedFunction, generated_function, number_of
from specc.compiler.kernels.kernel import Site
from specc.compiler.kernels.lines import flowed, listed, nested
from specc.compiler.ops.caches.key_value_cache import LARGEST
from specc.compiler.ops.decoding.rope_attention import RopeAttention

OP = "attend_and_write"  # the custom op
# Constants of the tile, and the variables of the launch that replace them
CHOSEN = {"KEYS": "keys", "WARPS": "warps", "STAGES": "stages"}
PROMISE = '''\
    """Returns y and writes to the cache, whose positions have no gaps. Raises ValueError for other tensors."""'''
# For each layout of pairs: the pair of channel c, and the other channel of the pair
NEIGHBORS = "pair, other = c // 2, c ^ 1"
HALVES = "pair, other = c % PAIRS, tl.where(c < PAIRS, c + PAIRS, c - PAIRS)"


class StepWriter(Writer):
    """Writes the template context of one `RopeAttention`.

    The keys of the cache are divided into ranges, one per program instance. The program instance of the last range has
    the fewest keys. This program instance also rotates the new key, attends to the new token, and writes the new key
    and value to the cache.
    """

    def __init__(self, site: Site, tile: CachedTile, many: CachedTile | None) -> None:
        super().__init__(site, tile)
        assert isinstance(site.node.op, RopeAttention)
        self.step = site.node.op
        # Without a ring buffer, the numbers of tiles before a window are constants of the kernel. These constants
        # depend on the tile, so such a kernel has only one tile.
        self.many = many if self.ring is not None or self._window() is None else None
        self.chosen = CHOSEN if self.many is not None else {}

    def context(self) -> CachedContext:
        context = super().context()
        parameters = [f"{name}: Tensor" for name in self.inputs]
        returned = ", ".join(("y", *self.stored))
        call = listed(f"y = {OP}(", list(self.inputs), ")", 4).lstrip()
        return replace(
            context,
            new_token=self._new_token(),
            chosen=self._choice(),
            options=self._options(),
            written=", ".join(f'"{name}"' for name in self.stored),
            custom_op=listed(f"def {OP}(", parameters, ") -> Tensor:"),
            fake=listed("def _(", parameters, ") -> Tensor:"),
            registered=OP,
            promise=PROMISE,
            outer=("", "", context.op.signature, *self._outer(context.op), f"    {call}", f"    return {returned}"),
            pairing=NEIGHBORS if self.step.neighbors else HALVES,
        )

    def _outer(self, function: GeneratedFunction) -> tuple[str, ...]:
        text = "The cache is written in place. All tensors are on one GPU. Raises ValueError for others."
        return function.promise, "", f"    {text}", '    """'

    def _helpers(self) -> tuple[str, ...]:
        codes = ("triton/e4m3.jinja",) if self.op.coded else ()
        return (*super()._helpers(), "triton/rotated_heads.jinja", *codes)

    def _words(self) -> list[str]:
        return [*super()._words(), "PAIRS"]

    def _settings(self) -> tuple[str, ...]:
        tile, many = self.many, tuple[str, ...]()
        if tile is not None:
            words = "KEYS, WARPS and STAGES if blocks of queries outnumber resident programs"
            many = (f"MANY = {tile.keys}, {tile.warps}, {tile.stages}  # {words}",)
        pairs = f"PAIRS = {number_of(self.inputs['cos'].width)}  # rotated pairs of channels"
        return (*super()._settings(), *many, pairs)

    def _choice(self) -> tuple[str, ...]:
        """Returns the line that chooses one of two tiles. The line chooses `MANY`, the smaller tile, if there are more
        blocks of queries than resident program instances. One program instance then reads all keys for a block of
        queries. The result is empty if there is only one tile."""
        condition = "MANY if b * G * row_tiles > room else (KEYS, WARPS, STAGES)"
        return (f"keys, warps, stages = {condition}",) if self.many is not None else ()

    def _options(self) -> str:
        warps, stages = (self.chosen.get(name, name) for name in ("WARPS", "STAGES"))
        return f"num_warps={warps}, num_stages={stages}, launch_pdl=PDL, enable_fp_fusion=False,"

    @property
    def _angles(self) -> str:
        row = " + b * PAIRS" if self.page else ""
        return f"cos_ptr{row}, sin_ptr{row}"

    def _queries(self) -> tuple[str, ...]:
        row = "q_ptr + (query * H + h) * C"
        return (nested("q", f"rotated({row}, {self._angles}, c, there & (c < C), PAIRS)"),)

    def _tiles(self) -> tuple[str, ...]:
        if self.ring is None:
            end, *lines = super()._tiles()
            assert end.startswith("end = ")
            return ("end = begin  # the new key is not read from the cache", *lines)
        first, window = self.ring
        place = f"{first} + (begin - {first}) % {window}" if first else f"begin % {window}"
        return (
            f"place = {f'tl.where(begin < {first}, begin, {place})' if first else place}  # of the new key",
            f"held = tl.minimum(begin, {first + window})",
            "tiles = tl.cdiv(held, KEYS)",
        )

    def _loops(self) -> tuple[Loop, ...]:
        if self.ring is None:
            return super()._loops()
        old = super()._loops()[0]
        keys = tuple(line.replace("slot < held", "(slot < held) & (slot != place)") for line in old.keys)
        return (replace(old, span="part * share, tl.minimum(part * share + share, tiles)", keys=keys),)

    def _new_token(self) -> tuple[str, ...]:
        """Returns the lines that load the key and value of the new token, and a branch for the last range of keys. The
        branch attends to the new key, and writes the key and value to the cache. The load is outside of the branch,
        next to the loads of the queries."""
        row = "new_k_ptr + new_row * C"
        inner = (
            *self._codes(),
            *self._place(),
            "tl.store(k_ptr + new * C + c, k, mask=(c < C) & (tile == 0))",
            "tl.store(v_ptr + new * D + d, v, mask=(d < D) & (tile == 0))",
            *self._scores(),
            "most = tl.max(x, 1) * LOG2E",
            'base = tl.where(most == float("-inf"), 0.0, most)',
            "p = tl.exp2(x * LOG2E - base[:, None])",
            "total = tl.sum(p, 1)",
            f"y = {self._weights}.to({self.element}).to(tl.float32) * value",
        )
        return (
            "new_row, last_part = b.to(tl.int64) * G + g, part == PARTS - 1",
            nested("new_k", f"rotated({row}, {self._angles}, c, (c < C) & last_part, PAIRS)"),
            "new_v = tl.load(new_v_ptr + new_row * D + d, mask=(d < D) & last_part, other=0.0)",
            "if last_part:",
            *(f"    {line}" for line in inner),
        )

    def _codes(self) -> tuple[str, ...]:
        if not self.op.coded:
            return ("k, v = new_k, new_v",)
        names = ("k", "v")
        return (
            *(f"{name}_scale = scale_of(tl.max(tl.abs(new_{name}.to(tl.float32)), 1))" for name in names),
            *(f"{name} = to_e4m3(new_{name}, {name}_scale[:, None])" for name in names),
        )

    def _place(self) -> tuple[str, ...]:
        place = "begin" if self.ring is None else "place"
        lines = [f"new = (b.to(tl.int64) * APART + {place}) * G + g"]
        if self.page:
            lines = [
                "new_page = tl.load(table_ptr + b.to(tl.int64) * N + begin // PAGE)",
                "new = (new_page * APART + begin % PAGE) * G + g",
            ]
        for name in ("k_scale", "v_scale") if self.op.coded else ():
            lines.append(f"tl.store({name}_ptr + new + tl.arange(0, 1), {name}, mask=tile == 0)")
        return tuple(lines)

    def _scores(self) -> tuple[str, ...]:
        scale = "(k_scale * SCALE)[:, None]" if self.op.coded else "SCALE"
        lines = [
            *(f"{name} = {x}{self._decode}.to(tl.float32)" for name, x in (("key", "k"), ("value", "v"))),
            f"s = tl.sum(q.to(tl.float32) * key, 1)[:, None] * {scale}",
            "j = tl.zeros((1, 1), tl.int32) + begin",
            *self.lines.convert("fj"),
            *self._masked("there"),
        ]
        return tuple(lines)

    def _prepared(self) -> tuple[str, ...]:
        lines = [f"{name} = {name}.contiguous()" for name in ("cos", "sin")]
        *others, _ = super()._prepared()
        views = ", ".join(self.stored)
        lines += [
            f"apart, views = rows({views})",
            f"if any(x.data_ptr() != y.data_ptr() for x, y in zip(views, ({views}), strict=True)):",
            '    raise ValueError(f"{NODE}: the positions of the cache have gaps")',
        ]
        return (*others, *lines)

    def _shape(self, name: str, launched: Sequence[str]) -> tuple[str, ...]:
        b, *_, h, g, c, d = launched
        one = ("1", b) if self.page else (b, "1")
        if name in ("q", "y"):
            return *one, h, c if name == "q" else d
        if name in ("new_k", "new_v"):
            return *one, g, c if name == "new_k" else d
        if name in ("cos", "sin"):
            return b if self.page else "1", str(number_of(self.inputs["cos"].width))
        if name == "start":
            return one
        if name == "positions":
            return (b if self.page else "1",)
        return super()._shape(name, launched)

    def _sizes(self, launched: bool) -> tuple[str, ...]:
        if launched:
            return super()._sizes(launched)
        return ("(b, n), s = table.shape, len(k)",) if self.page else ("b, s = len(q), k.shape[1]",)

    def _function(self) -> GeneratedFunction:
        outputs = dict(zip(("y", *self.stored), self.site.node.types, strict=True))
        heads = map(str, (self.heads, self.kv_heads, self.channels, self.values))
        names = ("R", "1", "P", "N", *heads) if self.page else ("B", "1", "S", "N", *heads)
        shapes = {
            name: f"[{', '.join(self._shape(name, names))}]".replace("PAGE", str(self.page))
            for name in (*self.inputs, *outputs)
        }
        summary = f"{self.site.label}: {self.op.words}, by ranges of keys."
        launched = [*self.inputs, "y"]
        return generated_function(self.site, self.inputs, outputs, shapes, summary, self._formulas(), launched=launched)

    def _formulas(self) -> list[str]:
        pairs = number_of(self.inputs["cos"].width)
        first, second = ("2 * i", "2 * i + 1") if self.step.neighbors else ("i", f"i + {pairs}")
        lines = [
            f"a, b = x[{first}], x[{second}], for x in (q, new_k) and i < {pairs}, in fp32",
            f"x[{first}], x[{second}] = a * cos[i] + b * sin[i], b * cos[i] - a * sin[i]",
            "k and v at the position of the query are new_k and new_v",
        ]
        if self.op.coded:
            lines.append(
                f"scale = max(abs(row)) / {LARGEST:g} in bf16, or 1 for a row of zeros; codes = e4m3(row / scale)"
            )
        if self.ring is not None:
            first_rows, window = self.ring
            row = f"{first_rows} + (position - {first_rows}) % {window}" if first_rows else f"position % {window}"
            before = f"position, if less than {first_rows}, else " if first_rows else ""
            lines.append(f"row of a position: {before}{row}")
        texts = [text for text in super()._formulas() if "are a ring of" not in text]
        return [*lines, *texts]

    def _how(self) -> str:
        text = " The program of the last range rotates the new key, attends to it and writes it; the others do not read"
        text += " its row. Products and sums of rotations are rounded one by one, as those of Torch."
        return flowed(f"{super()._how().replace(chr(10), ' ')}{text}")
