"""A matrix product and its pointwise epilogue as one Triton kernel. On a target with TMA, the kernel is persistent and
uses TMA. On other targets, the kernel uses pointers."""

from dataclasses import replace
from typing import ClassVar

from specc.compiler.expr import triton_text
from specc.compiler.kernels.epilogue import Epilogue, Result, Value, epilogue_of, refusal
from specc.compiler.kernels.gemm.product import Product, product_function, product_of
from specc.compiler.kernels.generated import TRITON_DTYPES, GeneratedFunction, python_file
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, lacks_memory
from specc.compiler.kernels.lines import listed, nested
from specc.compiler.kernels.tile import ACCUMULATORS, Tile, candidates, loaded_bytes, tile_of, whole_tiles
from specc.compiler.ops.dropout import least_word
from specc.compiler.ops.fp8_codes import FORMATS
from specc.compiler.records import record

LARGEST_WEIGHT = 2**31  # elements; pointer offsets into it have 32 bits
GROUP = 8  # number of row tiles that run at the same time, so that they read the same weight columns from L2


@record
class TmaContext:
    """The context of templates/triton/linear_tma.py.jinja. `finish` and `kernel` are the signatures of functions. The
    tuples hold lines of function bodies."""

    TEMPLATE: ClassVar[str] = "triton/linear_tma.py.jinja"
    op: GeneratedFunction
    product: Product
    tile: Tile
    accumulators: tuple[str, ...]
    finish: str
    epilogue: tuple[str, ...]
    kernel: str
    dots: tuple[str, ...]
    halves: tuple[str, ...]
    descriptors: tuple[str, ...]
    draws: bool
    rounds: bool


@record
class PointerContext:
    """The context of templates/triton/linear_pointer.py.jinja. `starts` are lines before the kernel's loop, and `dots`
    are lines in the loop."""

    TEMPLATE: ClassVar[str] = "triton/linear_pointer.py.jinja"
    op: GeneratedFunction
    product: Product
    tile: Tile
    group: int
    accumulators: tuple[str, ...]
    kernel: str
    starts: tuple[str, ...]
    dots: tuple[str, ...]
    inside: str
    epilogue: tuple[str, ...]
    tensors: str
    draws: bool
    rounds: bool


@record
class LinearTriton(Kernel):
    """Accepts one or two matrix products of the same rows, with any epilogue, operands and outputs.

    `tile` is the measured tile. If `tile` is None, the kernel uses the result of `tile_of`.
    """

    RANK: ClassVar[int] = 1
    TILE: ClassVar[type | None] = Tile
    tile: Tile | None = None

    def rejects(self, site: Site) -> str | None:
        if reason := refusal(site):
            return reason
        if (count := site.node.op.arity - 1) > ACCUMULATORS:
            return f"keeps at most {ACCUMULATORS} accumulators in registers; this node has {count}"
        epilogue = epilogue_of(site)
        if epilogue.n * epilogue.k >= LARGEST_WEIGHT:
            return f"addresses weights with 32-bit offsets; {epilogue.n} x {epilogue.k} elements need more"
        needed = loaded_bytes(epilogue, self.tile) if self.tile is not None else 0
        return lacks_memory(site, needed, f"the loads of {self.tile}")

    def variants(self, site: Site) -> tuple[Kernel, ...]:
        return tuple(replace(self, tile=tile) for tile in candidates(site.target, epilogue_of(site)))

    def padding(self, site: Site, rows: int) -> float:
        epilogue = epilogue_of(site)
        tile = self.tile or tile_of(site.target, epilogue)
        return whole_tiles(rows, tile.m) * whole_tiles(epilogue.n, tile.n)

    def render(self, site: Site) -> Rendered:
        epilogue = epilogue_of(site)
        tile = self.tile or tile_of(site.target, epilogue)
        op = product_function(site, epilogue)
        context = (_tma if "tma" in site.target.features else _pointer)(op, epilogue, tile)
        return python_file(op, context.TEMPLATE, context, str(tile))


LINEAR_TRITON = LinearTriton("linear_triton", "triton", frozenset({"mma"}))


def _tma(op: GeneratedFunction, epilogue: Epilogue, tile: Tile) -> TmaContext:
    tensors = [_handle(value) for value in (*epilogue.inputs, *epilogue.outputs)]
    columns = bool(epilogue.draws or epilogue.changed) or any(value.column for value in epilogue.operands)
    ragged = epilogue.n % tile.n > 0
    handles = [_handle(value) for value in (*epilogue.operands, *epilogue.outputs)]
    width = ["M", "N"] if epilogue.changed else ["N"] if columns and ragged else []
    lefts, rights = ([p.replace("p", side, 1) for p in epilogue.accumulators] for side in ("left", "right"))
    halves = ([*lefts, "m", "n"], [*rights, "m", "n + BLOCK_N // 2"])
    at = _WEIGHT_AT[epilogue.layout]
    sizes = map(_constexpr, ("N", "K", "BLOCK_M", "BLOCK_N", "BLOCK_K", "PROGRAMS"))
    return TmaContext(
        op=op,
        product=product_of(epilogue),
        tile=tile,
        accumulators=epilogue.accumulators,
        finish=listed(
            "def finish(",
            [
                *epilogue.accumulators,
                "m",
                "n",
                *handles,
                *(name if name == "M" else _constexpr(name) for name in width),
            ],
            "):",
        ),
        epilogue=(
            *([f"columns = n + tl.arange(0, {epilogue.accumulators[0]}.shape[1])"] if columns else []),
            *(
                [f"rows = m + tl.arange(0, {epilogue.accumulators[0]}.shape[0])[:, None]"]
                if epilogue.draws or epilogue.changed
                else []
            ),
            *(["inside = (rows < M) & (columns[None, :] < N)"] if epilogue.changed else []),
            *filter(None, (_tma_read(value, ragged, epilogue) for value in epilogue.operands)),
            *_steps(epilogue, "{name}_desc.store([m, n], {name}.to({dtype}))"),
        ),
        kernel=listed(f"def {op.function}_kernel(", [*tensors, "M", *sizes], "):"),
        dots=(
            f"{epilogue.x.name} = {epilogue.x.name}_desc.load([m, k])",
            *(
                f"{p} = tl.dot({epilogue.x.name}, {w.name}_desc.load({at}, {p}{_sums(epilogue)})"
                for p, w in zip(epilogue.accumulators, epilogue.weights, strict=True)
            ),
        ),
        halves=(
            *(f"{a}, {b} = halves({p})" for p, a, b in zip(epilogue.accumulators, lefts, rights, strict=True)),
            *(listed("finish(", [*half, *handles, *width], ")", 8).lstrip() for half in halves),
        ),
        descriptors=tuple(_descriptor(value, epilogue) for value in (*epilogue.inputs, *epilogue.outputs)),
        draws=bool(epilogue.draws),
        rounds=bool(epilogue.changed),
    )


_WEIGHT_AT = {"nk": "[n, k]).T", "kn": "[k, n])"}


def _sums(epilogue: Epilogue) -> str:
    """Returns the `tl.dot` argument that makes Triton add 8-bit products in f32. Without this argument, tensor cores
    add with lower precision."""
    return ", max_num_imprecise_acc=BLOCK_K" if epilogue.x.type.dtype in FORMATS else ""


def _constexpr(name: str) -> str:
    return f"{name}: tl.constexpr"


def _handle(value: Value) -> str:
    return f"{value.name}_desc" if value.tile else f"{value.name}_ptr"


def _of_buffer(value: Value, epilogue: Epilogue, columns: str) -> str:
    if value.name in epilogue.scales:
        i, j = epilogue.scales[value.name]
        return f"{value.name} = tl.load({value.name}_ptr + {i}) * tl.load({value.name}_ptr + {j})"
    if value.name not in epilogue.draws:
        return ""
    least = least_word(epilogue.draws[value.name])
    return nested(value.name, f"kept({value.name}_ptr, rows, {columns}, {least})")


def _tma_read(value: Value, ragged: bool, epilogue: Epilogue) -> str:
    if value.buffer:
        return _of_buffer(value, epilogue, "columns[None, :]")
    if value.tile:
        return nested(value.name, f"{value.name}_desc.load([m, n]).to(tl.float32)")
    load = _masked(f"{value.name}_ptr + columns", ["columns < N"] if ragged else [])
    return nested(value.name, f"{load}.to(tl.float32)[None, :]")


def _steps(epilogue: Epilogue, store: str) -> tuple[str, ...]:
    return tuple(
        line
        for step in epilogue.steps
        for line in (
            nested(step.value.name, triton_text(step.expr)),
            *_rounded(step),
            store.format(name=step.value.name, dtype=TRITON_DTYPES[step.value.type.dtype]),
        )
    )


def _rounded(step: Result) -> tuple[str, ...]:
    if (rounding := step.rounding) is None:
        return ()
    value = f"{step.value.name}.to({TRITON_DTYPES[rounding.dtype]})"
    text = f"scaled({value}, {rounding.state}_ptr, inside, {rounding.factor}, {rounding.most})"
    return (nested(step.value.name, text),)


def _descriptor(value: Value, epilogue: Epilogue) -> str:
    name = value.name
    if value.column or value.buffer:
        return f"{name},"
    if value is epilogue.x:
        shape, strides, block = "m, K", "K, 1", "BLOCK_M, BLOCK_K"
    elif value in epilogue.weights and epilogue.layout == "nk":
        shape, strides, block = "N, K", "K, 1", "BLOCK_N, BLOCK_K"
    elif value in epilogue.weights:
        shape, strides, block = "K, N", "N, 1", "BLOCK_K, BLOCK_N"
    else:
        shape, strides, block = "m, N", "N, 1", "BLOCK_M, BLOCK_N // 2"
    return f"TensorDescriptor({name}, [{shape}], [{strides}], [{block}]),"


def _pointer(op: GeneratedFunction, epilogue: Epilogue, tile: Tile) -> PointerContext:
    x = epilogue.x.name
    tensors = [value.name for value in (*epilogue.inputs, *epilogue.outputs)]
    sizes = map(_constexpr, ("N", "K", "BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP"))
    ragged_n, ragged_k = epilogue.n % tile.n > 0, epilogue.k % tile.k > 0
    weight = {"nk": "columns * K + ks[:, None]", "kn": "ks[:, None] * N + columns"}[epilogue.layout]
    step = {"nk": "k", "kn": "k * N"}[epilogue.layout]
    deep = ["ks[:, None] < K - k"] if ragged_k else []
    across = ["columns < N"] if ragged_n else []
    return PointerContext(
        op=op,
        product=product_of(epilogue),
        tile=tile,
        group=GROUP,
        accumulators=epilogue.accumulators,
        kernel=listed(f"def {op.function}_kernel(", [*(f"{name}_ptr" for name in tensors), "M", *sizes], "):"),
        starts=(
            f"{x}_tile = {x}_ptr + rows * K + ks[None, :]",
            *(f"{w.name}_tile = {w.name}_ptr + {weight}" for w in epilogue.weights),
        ),
        dots=(
            nested(x, _masked(f"{x}_tile + k", ["rows < M", *(["ks[None, :] < K - k"] if ragged_k else [])]), 8),
            *(
                line
                for p, w in zip(epilogue.accumulators, epilogue.weights, strict=True)
                for line in (
                    nested(w.name, _masked(f"{w.name}_tile + {step}", deep + across), 8),
                    f"{p} = tl.dot({x}, {w.name}, {p}{_sums(epilogue)})",
                )
            ),
        ),
        inside=_all(["rows < M", *across]),
        epilogue=(
            *filter(None, (_pointer_read(value, across, epilogue) for value in epilogue.operands)),
            *_steps(epilogue, "tl.store({name}_ptr + at, {name}.to({dtype}), mask=inside)"),
        ),
        tensors=listed("", tensors, ",", indent=8),
        draws=bool(epilogue.draws),
        rounds=bool(epilogue.changed),
    )


def _pointer_read(value: Value, across: list[str], epilogue: Epilogue) -> str:
    if value.buffer:
        return _of_buffer(value, epilogue, "columns")
    place, conditions = ("columns", across) if value.column else ("at", ["inside"])
    return nested(value.name, f"{_masked(f'{value.name}_ptr + {place}', conditions)}.to(tl.float32)")


def _masked(pointer: str, conditions: list[str]) -> str:
    return f"tl.load({pointer}, mask={_all(conditions)}, other=0.0)" if conditions else f"tl.load({pointer})"


def _all(conditions: list[str]) -> str:
    return conditions[0] if len(conditions) == 1 else " & ".join(f"({condition})" for condition in conditions)
