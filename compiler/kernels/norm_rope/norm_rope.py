"""Norm, rotary embedding and gain of attention heads, forward and backward: Triton kernels with plain pointers."""

from dataclasses import replace
from typing import ClassVar, NamedTuple

from specc.compiler.errors import counted
from specc.compiler.expr import ExprError, reread, torch_text, triton_text
from specc.compiler.expr.python_lines import BODY, fitted, operand
from specc.compiler.ir.types import DTYPES
from specc.compiler.kernels.epilogue import FLOATS
from specc.compiler.kernels.generated import TRITON_DTYPES, GeneratedFunction, constants, python_file
from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.kernels.lines import flowed, listed, unbroken
from specc.compiler.kernels.norm_rope.heads import WHOLE, Heads, about, heads_function, heads_of
from specc.compiler.kernels.tile import MOST_WARPS, between, power
from specc.compiler.ops.norm_rope import HeadRotation
from specc.compiler.records import record

LARGEST_HEAD = 4096  # the most channels of a head; a head stays in registers
MOST_GAINS = 256  # the most heads whose gains a program instance can sum at its end
LARGEST_TILE = 1 << 17  # the number of elements that a program instance holds at once
LOADED = 1024  # elements per tile: 8 per thread, i.e. 16 bytes of bf16, one vector load


@record
class HeadTile:
    """The work of one program instance with `warps` warps. A row is a pair of position and head. The program instance
    processes the same `rows` rows of `sequences` sequences, one sequence after another.

    Raises ValueError if a field is out of its bounds.
    """

    rows: int
    sequences: int
    warps: int

    def __post_init__(self) -> None:
        power("rows", self.rows, 1, LARGEST_TILE)
        between("sequences", self.sequences, 1, LARGEST_HEAD)
        power("warps", self.warps, 1, MOST_WARPS)

    def __str__(self) -> str:
        numbers = ((self.rows, "head"), (self.sequences, "sequence"), (self.warps, "warp"))
        return ", ".join(counted(count, word) for count, word in numbers)


def head_tile(block: int) -> HeadTile:
    """Returns the default tile for rows of `block` elements.

    Each thread has one load per tensor in flight. All loads of a tile are therefore issued before the first value is
    used. With two loads per tensor, the compiled kernel would wait for the first load before it issues the second. Four
    sequences share one read of the angles. With more sequences per program instance, there would be too few program
    instances to fill a GPU.
    """
    return HeadTile(max(1, LOADED // block), 4, max(4, block // 256))


# Tiles worth measuring: elements per tile, sequences, warps.
TILES = ((1024, 4, 4), (1024, 2, 4), (1024, 8, 4), (1024, 1, 4), (512, 4, 2), (2048, 4, 8), (2048, 4, 4), (2048, 2, 4))


class HeadContext(NamedTuple):
    """The context of templates/triton/norm_rope.py.jinja.

    Attributes:
        how: A description of the kernel's algorithm.
        inside: The mask that selects the valid elements of a tile, as an expression.
        halves: Whether a program instance holds the two halves of each head in separate tiles, and loads every pair
            once. Otherwise, a program instance loads whole heads, and for each channel also the other channel of its
            pair.
        other: The other channel in the pair of channel c, as an expression.
        pair: The index of the pair that contains channel c, as an expression.
        signed: The signed sine for each channel of a whole head, as an expression.
        body: The template of the kernel's loop.
        loops: Whether a program instance has a loop over several sequences.
        indent: The indentation of the lines that are in the loop, if there is a loop.
        before: Lines before the loop.
        loads: Lines in the loop that load additional inputs.
        lines: Other lines in the loop.
        after: Lines after the loop, which write partial sums for the gradients of weight and gain.
        conditions: The required layouts, as the last sentence of the op's docstring.
        wanted: The input checks of the generated function.
        allocated: Lines that allocate the outputs.
        into: Whether dx is written to a part of a given tensor.
        begins: Lines of the backward kernel that compute the address of the first result.
        advances: The line of the backward kernel that advances this address to the next sequence.
        head: The first line of the custom op.
        ending: The lines of the function after its docstring, if the function is not the custom op itself.
    """

    op: GeneratedFunction
    how: str
    heads: int
    channels: int
    pairs: int
    settings: str
    kernel: str
    place: str
    inside: str
    halves: bool
    other: str
    pair: str
    signed: str
    body: str
    loops: bool
    indent: str
    before: tuple[str, ...]
    loads: tuple[str, ...]
    lines: tuple[str, ...]
    after: tuple[str, ...]
    first: str
    arguments: str
    conditions: str
    spacing: tuple[str, ...]
    wanted: tuple[str, ...]
    layout: tuple[str, ...]
    allocated: tuple[str, ...]
    returns: str
    fake_signature: str
    fake: str
    into: bool = False
    begins: tuple[str, ...] = ()
    advances: str = ""
    head: str = ""
    ending: tuple[str, ...] = ()


@record
class NormRopeTriton(Kernel):
    """Accepts any number of heads of up to 4,096 channels, rotated entirely or in part. `tile` is the measured tile. If
    `tile` is None, the kernel uses the result of `head_tile`."""

    TILE: ClassVar[type | None] = HeadTile
    tile: HeadTile | None = None

    def rejects(self, site: Site) -> str | None:
        heads = heads_of(site)
        for name, type in heads.inputs.items():
            known = ("f32",) if name in ("cos", "sin") else FLOATS
            if type.dtype not in known:
                return f"reads {name} in {' or '.join(known)}, not in {type.dtype}"
        if heads.channels > LARGEST_HEAD:
            return f"holds a head in registers, at most {LARGEST_HEAD} channels; these have {heads.channels}"
        if "dgain" in heads.outputs and heads.count > MOST_GAINS:
            return f"sums the gradients of at most {MOST_GAINS} gains; there are {heads.count}"
        try:
            [triton_text(reread(text)) for text in (heads.op.weight, heads.op.weight and heads.weight_slope) if text]
        except ExprError as error:
            return f"cannot print {heads.op.weight}: {error.message}"
        if self.tile is not None and (held := self.tile.rows * _block(heads)) > LARGEST_TILE:
            return f"holds at most {LARGEST_TILE:,} elements at once; a tile of {self.tile} has {held:,}"
        return None

    def variants(self, site: Site) -> tuple[Kernel, ...]:
        block = _block(heads_of(site))
        tiles = [HeadTile(max(1, size // block), sequences, warps) for size, sequences, warps in TILES]
        if block > LOADED:
            tiles = [HeadTile(1, sequences, block // size) for size in (256, 128) for sequences in (4, 2, 8)]
        return tuple(replace(self, tile=tile) for tile in dict.fromkeys(tiles))

    def render(self, site: Site) -> Rendered:
        tile = self.tile or head_tile(_block(heads_of(site)))
        context = _context(site, tile)
        return python_file(context.op, "triton/norm_rope.py.jinja", context, str(tile))


NORM_ROPE_TRITON = NormRopeTriton("norm_rope_triton", "triton", frozenset({"gpu"}), HeadRotation)


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _block(heads: Heads) -> int:
    return _power(heads.pairs if heads.halves else heads.channels)


def _context(site: Site, tile: HeadTile) -> HeadContext:
    heads = heads_of(site)
    block = _block(heads)
    tensors = tuple(dict.fromkeys((*heads.inputs, *(PARTIAL.get(name, name) for name in heads.outputs))))
    op = heads_function(site, f"{site.label}: {about(site)} in one kernel.", tensors)
    first, pointers = tensors[0], [f"{name}_ptr" for name in tensors]
    arguments = [f"{name}: Tensor" for name in heads.inputs]
    settings = {"ROWS": tile.rows, "BLOCK": block, "SEQUENCES": tile.sequences, "WARPS": tile.warps}
    settings |= {"HEADS": _power(heads.count)} if "dgain" in heads.outputs else {}
    into = heads.at is not None
    if heads.at is not None:
        settings |= {"WIDTH": heads.width, "AT": heads.at}
    sizes = ["H", "C", "R", *(name for name in settings if name != "WARPS")]
    loops = tile.sequences > 1
    values = [*["tokens // t"] * loops, "t", *["x.flatten(0, -3).stride(0)"] * heads.reads_x, *sizes]
    sizes = ["STRIDE"] * heads.reads_x + sizes
    width, end = (heads.pairs, "R") if heads.halves else (heads.channels, "C")
    gain = ("gain = tl.load(gain_ptr + head).to(tl.float32)",) * heads.op.gain
    before, loads, lines = (_backward if heads.backward else _forward)(heads)
    learned = [name for name in heads.op.learned if heads.backward]
    neighbors = heads.op.neighbors
    signed = ("-sin", "sin") if heads.backward else ("sin", "-sin")
    return HeadContext(
        op=op,
        how=_how(site, tile),
        heads=heads.count,
        channels=heads.channels,
        pairs=heads.pairs,
        settings=constants(settings),
        kernel=listed(
            f"def {op.function}_kernel(",
            [*pointers, *["B"] * loops, "T", *(f"{name}: tl.constexpr" for name in sizes)],
            "):",
        ),
        place="token, head = row // H, row % H" if heads.reads_x or into else "token = row // H",
        inside=f"(token < T) & (c < {end})" if block > width else "token < T",
        halves=heads.halves,
        other="c ^ 1" if neighbors else "tl.where(c < R, c + R, c - R)",
        pair="c // 2" if neighbors else "c % R",
        signed=f"tl.where({'c % 2 == 0' if neighbors else 'c < R'}, {', '.join(signed)})",
        body=f"triton/norm_rope_{'backward' if heads.backward else 'forward'}.py.jinja",
        loops=loops,
        indent=" " * (8 if loops else 4),
        before=(*gain, *_weights(heads), *before),
        loads=loads,
        lines=lines,
        after=_after(heads),
        first=first,
        arguments=flowed(f"{', '.join(map(unbroken, (*tensors, *values)))},", " " * 8),
        conditions=_conditions(heads),
        spacing=_SPACING if heads.reads_x else (),
        wanted=tuple(_wanted(name, heads) for name in heads.inputs),
        layout=_LAYOUT if heads.reads_x else ('layout = "contiguous"',),
        allocated=_allocated(heads),
        returns=", ".join(_returned(heads, name) for name in heads.outputs if name != WHOLE),
        fake_signature=f"def _({', '.join(arguments if learned else [arguments[0], '*_: Tensor'])}):",
        fake=", ".join(f"{name}.new_empty({name}.shape)" for name in (*[first] * (not into), *learned)),
        into=into,
        begins=_INTO if into else ("dx_ptr += first * T * H * C",),
        advances=f"{WHOLE}_ptr += tl.cast(T, tl.int64) * WIDTH" if into else "dx_ptr += tl.cast(T, tl.int64) * H * C",
        head=listed("def write(", arguments, f") -> {_annotation(len(learned))}:") if into else op.signature,
        ending=_ending(heads, learned) if into else (),
    )


def _annotation(count: int) -> str:
    return ("None", "Tensor")[count] if count < 2 else f"tuple[{', '.join(['Tensor'] * count)}]"


def _ending(heads: Heads, learned: list[str]) -> tuple[str, ...]:
    """Returns the lines that call the custom op, and the return statement. The custom op returns only the gradients of
    the `learned` inputs, because an op must not return an input. The return statement adds the tensor into which the op
    has written dx."""
    call, gradients = f"write({', '.join(heads.inputs)})", [f"d{name}" for name in learned]
    if not gradients:
        return call, f"return {WHOLE}"
    return f"{', '.join(gradients)} = {call}", f"return {', '.join((WHOLE, *gradients))}"


# The partial sums of each program instance, which Torch adds
PARTIAL = {"dweight": "weight_partial", "dgain": "partial"}

_INTO = ("whole_at = token.to(tl.int64) * WIDTH + AT + head * C", "whole_ptr += first * T * WIDTH")
_SPACING = (
    "tokens = x.flatten(0, max(x.dim() - 3, 0))  # a view where tokens follow each other evenly",
    "even = tokens.data_ptr() == x.data_ptr() and tokens.stride()[1:] == (C, 1)",
)
_LAYOUT = ('layout = "evenly spaced tokens of contiguous heads" if tensor is x else "contiguous"',)


def _wanted(name: str, heads: Heads) -> str:
    dtype = heads.inputs[name].dtype
    shapes = {"cos": "(t, R)", "sin": "(t, R)", "weight": "(C,)", "gain": "(H, 1)", WHOLE: "(*heads[:-2], WIDTH)"}
    shape = shapes.get(name, "heads")
    laid = "even" if name == "x" else f"{name}.is_contiguous()"
    return f'("{name}", {name}, {shape}, {DTYPES[dtype]}, {laid}, {4 if name in heads.op.learned else 16}),'


def _allocated(heads: Heads) -> tuple[str, ...]:
    if not heads.backward:
        return ("y = x.new_empty(x.shape)",)
    lines = ("dx = torch.empty_like(dy)",) if heads.at is None else ()
    if len(heads.outputs) == 1:
        return lines
    shapes = {"weight_partial": "programs, C", "partial": "H, programs"}
    partial = [PARTIAL[name] for name in heads.outputs if name in PARTIAL]
    allocations = (f"{name} = dy.new_empty({shapes[name]}, dtype=torch.float32)" for name in partial)
    return (*lines, "(programs,) = grid_of(dy.numel() // (H * C), t)", *allocations)


def _returned(heads: Heads, name: str) -> str:
    if name not in PARTIAL:
        return name
    cast = f".to({DTYPES[heads.outputs[name].dtype]})"
    if name == "dgain":
        return f"{PARTIAL[name]}.sum(1, keepdim=True){cast}"
    slope = heads.weight_slope
    total = f"{PARTIAL[name]}.sum(0)"
    if not slope:
        return f"{total}{cast}"
    return f"({total} * {operand(torch_text(reread(slope), {'w': 'weight.float()'}))}){cast}"


def _conditions(heads: Heads) -> str:
    words = "On one GPU, with any leading dims, contiguous and aligned"
    apart = ", but for x, whose tokens may be further apart" if heads.reads_x else ""
    return flowed(f"{words}{apart}. ValueError says what is not.", "    ")


def _how(site: Site, tile: HeadTile) -> str:
    heads = heads_of(site)
    rows = "a head of a token" if tile.rows == 1 else f"{tile.rows} heads of tokens"
    words = f"Triton kernel for {site.target.name}: a program takes {rows}"
    if tile.sequences > 1:
        words += f" at the same place of {tile.sequences} sequences, so that it reads their angles once"
    words += ". All of it in fp32, each result rounded once where it is stored."
    if sums := [name for name in heads.outputs if name in PARTIAL]:
        words += f" Torch sums what each program has of {' and '.join(sums)}: the same bits in every run."
    return flowed(words)


def _places(heads: Heads) -> tuple[tuple[str, str, str], ...]:
    if heads.halves:
        return ("weight_a", "c", "c < R"), ("weight_b", "c + R", "c < R")
    pair = () if heads.backward else (("weight_pair", "other", "c < 2 * R"),)
    return ("weight", "c", "c < C"), *pair


def _weights(heads: Heads) -> tuple[str, ...]:
    if not heads.op.weight:
        return ()
    lines = []
    for name, at, mask in _places(heads):
        loaded = f"tl.load(weight_ptr + {at}, mask={mask}, other=0.0).to(tl.float32)"
        lines.append(f"{name} = {loaded}")
        if heads.op.weight != "w":
            lines.append(f"{name} = {triton_text(reread(heads.op.weight), {'w': name})}")
    return tuple(lines)


def _after(heads: Heads) -> tuple[str, ...]:
    lines: list[str] = []
    if "dweight" in heads.outputs:
        lines.append("weight_partial_ptr += tl.program_id(0).to(tl.int64) * C")
        for name, at, mask in _places(heads):
            total = f"tl.sum({name.replace('weight', 'weights')}, 0, keep_dims=True)"
            lines.append(f"tl.store(weight_partial_ptr + {at}, {total}, mask={mask})")
    if "dgain" in heads.outputs:
        lines.append("heads = tl.arange(0, HEADS)[None, :]")
        lines.append("sums = tl.sum(tl.where(head == heads, total, 0.0), 0, keep_dims=True)")
        lines.append("tl.store(partial_ptr + heads * tl.num_programs(0) + tl.program_id(0), sums, mask=heads < H)")
    return tuple(lines)


Lines = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]


def _store(name: str, value: str, half: bool, element: str, place: str = "y_at") -> str:
    at = f"{name}_ptr + {place} + c{' + R' if half else ''}"
    value = value if value.isidentifier() else f"({value})"
    return f"tl.store({at}, {value}.to({element}), mask=inside)"


def _forward(heads: Heads) -> Lines:
    eps, gain = heads.op.eps, heads.op.gain
    element = TRITON_DTYPES[next(iter(heads.outputs.values())).dtype]
    squares = "a * a + b * b" if heads.halves else "x * x"
    scale = f"scale = tl.rsqrt(tl.sum({squares}, 1, keep_dims=True) / C + {eps}){' * gain' if gain else ''}"
    factor = "scale * " if eps is not None else "gain * " if gain else ""
    turned = ["a * cos + b * sin", "b * cos - a * sin"] if heads.halves else ["x * cos + pair * sin"]
    values = [f"{factor}({value})" if factor else value for value in turned]
    stores = (_store("y", value, half > 0, element) for half, value in enumerate(values))
    weighted = ["a, b = a * weight_a, b * weight_b"] if heads.halves else ["x, pair = x * weight, pair * weight_pair"]
    return (), (), (*[scale] * (eps is not None), *weighted * bool(heads.op.weight), *stores)


def _backward(heads: Heads) -> Lines:
    eps, gain = heads.op.eps, heads.op.gain
    element = TRITON_DTYPES[next(iter(heads.outputs.values())).dtype]
    lines = ["dz = dy * cos + pair * sin"]
    values = [("dz", "x")]
    if heads.halves:
        lines = ["da, db = da * cos - db * sin, db * cos + da * sin"]
        values = [("da", "a"), ("db", "b")]
    squares = " + ".join(f"{x} * {x}" for _, x in values)
    products = " + ".join(f"{dz} * {x}" for dz, x in values)
    if eps is not None:
        lines.append(f"r = tl.rsqrt(tl.sum({squares}, 1, keep_dims=True) / C + {eps})")
        weights = [name for name, *_ in _places(heads)] if heads.op.weight else []
        for name, (dz, x) in zip(weights, values if weights else (), strict=True):
            lines.append(f"{name.replace('weight', 'weights')} += {'gain * ' if gain else ''}r * ({dz} * {x})")
            lines.append(f"{dz} *= {name}")
        lines.append(f"s = r * tl.sum({products}, 1, keep_dims=True)")
        lines.append("shift = r * s / C")
    elif gain:
        lines.append(f"s = tl.sum({products}, 1, keep_dims=True)")
    factors = ["gain"] * gain + ["r"] * (eps is not None)
    shifted = [f"({dz} - shift * {x})" if eps is not None else dz for dz, x in values]
    results = [" * ".join((*factors, value)) for value in shifted]
    lines += ["total += s"] * gain
    name, place = ("dx", "y_at") if heads.at is None else (WHOLE, "whole_at")
    stores = (_store(name, value, half > 0, element, place) for half, value in enumerate(results))
    lines += [text for store in stores for text in fitted(store, BODY)]
    if not heads.reads_x:
        return (), (), tuple(lines)
    loaded = (("a", "c"), ("b", "c + R")) if heads.halves else (("x", "c"),)
    loads = [f"{x} = tl.load(x_ptr + x_at + {at}, mask=inside, other=0.0).to(tl.float32)" for x, at in loaded]
    before = ["x_at = token.to(tl.int64) * STRIDE + head * C", "x_ptr += first * T * STRIDE"]
    before += ["total = tl.zeros((ROWS, 1), tl.float32)"] * gain
    if heads.op.weight:
        sums = (name.replace("weight", "weights") for name, *_ in _places(heads))
        before += [f"{name} = tl.zeros((ROWS, BLOCK), tl.float32)" for name in sums]
    return tuple(before), tuple(loads), tuple(lines)
