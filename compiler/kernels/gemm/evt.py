"""A product and its pointwise epilogue as a CUTLASS 3.x GEMM: a generated functor an output in its epilogue tree."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from specc.compiler.expr import Var, cuda_functions, cuda_text, variables
from specc.compiler.ir.graph import TensorType
from specc.compiler.kernels.custom_op import CustomOp, custom_op, header
from specc.compiler.kernels.epilogue import Epilogue, Result, Value, epilogue_of, refusal
from specc.compiler.kernels.gemm.split import GivenProduct, split
from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.kernels.lines import flowed, listed
from specc.compiler.kernels.tile import LARGEST_SIDE, between, power, whole_tiles
from specc.compiler.ops.linear import Product

ELEMENTS = {"bf16": "cutlass::bfloat16_t", "f16": "cutlass::half_t", "f32": "float"}
ENVIRONMENT = ("void* workspace", "cudaStream_t stream")
LAYOUTS = {"nk": "ColumnMajor", "kn": "RowMajor"}  # of the weight as CUTLASS's B, which it takes as [K, N]
WARPGROUP_ROWS, STEP = 64, 16  # rows that one warpgroup multiplies; what n and k are multiples of
LARGEST_CLUSTER = 8  # thread blocks, on any GPU that has clusters
RASTERS = ("", "along M", "along N")  # CUTLASS's RasterOrderOptions; the first goes by the problem's shape


@dataclass(frozen=True, slots=True)
class GemmTile:
    """Outputs a thread block computes, blocks a cluster, and how the warps share the work.

    `part` is the piece of the tile that the epilogue stages in shared memory at a time, CUTLASS's choice where
    None; `swizzle` and `raster` (an index of RASTERS) say in which order thread blocks walk the output.
    """

    m: int
    n: int
    k: int
    cluster: tuple[int, int]
    schedule: Literal["Pingpong", "Cooperative"]
    part: tuple[int, int] | None = None
    swizzle: int = 1
    raster: int = 0

    def __post_init__(self) -> None:
        power("m", self.m, WARPGROUP_ROWS * (1 + (self.schedule == "Cooperative")), LARGEST_SIDE)
        between("n", self.n, STEP, LARGEST_SIDE)
        power("k", self.k, STEP, LARGEST_SIDE)
        for side in self.cluster:
            power("cluster", side, 1, LARGEST_CLUSTER)
        between("cluster", self.cluster[0] * self.cluster[1], 1, LARGEST_CLUSTER)
        power("swizzle", self.swizzle, 1, 8)
        between("raster", self.raster, 0, len(RASTERS) - 1)
        if self.n % STEP:
            raise ValueError(f"n is {self.n}, and not a multiple of {STEP}")
        for whole, part in zip((self.m, self.n), self.part or (), strict=False):
            between("part", part, STEP, whole)
            if whole % part:
                raise ValueError(f"part is {part}, which does not divide {whole}")

    def __str__(self) -> str:
        shape = f"{self.m}x{self.n}x{self.k}, {self.schedule.lower()}"
        words = [f"{shape}, cluster {self.cluster[0]}x{self.cluster[1]}x1"]
        words += [f"epilogue {self.part[0]}x{self.part[1]}"] if self.part else []
        words += [f"swizzle {self.swizzle}"] if self.swizzle > 1 else []
        words += [RASTERS[self.raster]] if self.raster else []
        return ", ".join(words)

    @property
    def epilogue_schedule(self) -> str:
        """CUTLASS's name of the epilogue that goes with the schedule."""
        return {"Pingpong": "TmaWarpSpecialized", "Cooperative": "TmaWarpSpecializedCooperative"}[self.schedule]

    @property
    def epilogue_tile(self) -> str:
        """`part` as CUTLASS names it."""
        return (
            f"cute::Shape<cute::Int<{self.part[0]}>, cute::Int<{self.part[1]}>>"
            if self.part
            else "collective::EpilogueTileAuto"
        )


SQUARE = (64, 64)
PINGPONG = GemmTile(128, 128, 64, (2, 1), "Pingpong")
COOPERATIVE = GemmTile(128, 256, 64, (2, 1), "Cooperative")
WALKS = ((1, 0), (1, 2), (2, 2))  # swizzle and raster; they need no compilation
# What is worth compiling, the likeliest first. A pingpong tile belongs to one consumer warpgroup: at most 192 f32
# accumulators a thread fit beside the epilogue. Clusters of 1x2 and other cooperative tiles never came near the best.
CANDIDATES = (
    PINGPONG,
    GemmTile(64, 256, 64, (2, 1), "Pingpong"),
    GemmTile(128, 128, 128, (2, 1), "Pingpong"),
    GemmTile(128, 128, 64, (2, 1), "Pingpong", SQUARE),
    GemmTile(128, 192, 64, (2, 1), "Pingpong"),
    GemmTile(128, 128, 64, (1, 1), "Pingpong"),
    GemmTile(128, 128, 64, (1, 1), "Pingpong", SQUARE),
    GemmTile(128, 128, 128, (2, 1), "Pingpong", SQUARE),
    GemmTile(64, 256, 64, (2, 1), "Pingpong", SQUARE),
    COOPERATIVE,
)


@dataclass(frozen=True, slots=True)
class Functor:
    """One expression of the epilogue as a struct over fragments of fp32: `signature` and `value` are whole lines."""

    name: str
    signature: str
    result: str
    value: str


@dataclass(frozen=True, slots=True)
class GemmContext:
    """The context of templates/cutlass/gemm_evt.cu.jinja.

    `prelude` are functions that the expressions call, `functors` the expressions; `tree` says what they read and where
    their values go, and `tree_arguments` with which tensors; `pointers` and `entry` are signatures, `nulls` and
    `arguments` calls.
    """

    TEMPLATE: ClassVar[str] = "cutlass/gemm_evt.cu.jinja"
    op: CustomOp
    tile: GemmTile
    header: str
    formulas: tuple[str, ...]
    element: str
    weight_layout: str
    reads_tiles: bool
    reads_columns: bool
    writes_tiles: bool
    prelude: str
    functors: tuple[Functor, ...]
    result: str
    tree: str
    tree_arguments: str
    pointers: str
    nulls: str
    entry: str
    arguments: str
    weight: str


@dataclass(frozen=True, slots=True)
class LauncherContext:
    """The context of templates/cutlass/gemm_evt.py.jinja: the tensors that the compiled function takes and,
    with workspace and stream, how many pointers that makes; `library` are lines that compute products before it."""

    TEMPLATE: ClassVar[str] = "cutlass/gemm_evt.py.jinja"
    op: CustomOp
    tile: GemmTile
    pointer_count: int
    pointers: str
    library: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GemmEvt(Kernel):
    """Takes products of the same rows, any number of outputs, and any expressions over tiles and columns.

    It keeps one accumulator, of the last product; the others are the library's, which beats two accumulators in one
    kernel: 98,304 x 512 x 1792, three outputs, H200: the two bare products 0.54 ms, Triton's one kernel 0.92.
    """

    TILE: ClassVar[type | None] = GemmTile
    tile: GemmTile = PINGPONG

    def rejects(self, site: Site) -> str | None:
        if reason := refusal(site):
            return reason
        dtype = site.inputs[0].dtype
        if other := next((type.dtype for type in site.node.types if type.dtype != dtype), None):
            return f"writes the dtype that it multiplies, {dtype}; an output is {other}"
        # Two stages are the fewest that a producer and a consumer can share; 2 bytes a value.
        if (needed := 4 * self.tile.k * (self.tile.m + self.tile.n)) > site.target.shared_memory:
            known = f"{site.target.shared_memory:,} bytes of shared memory on {site.target.name}"
            return f"has {known}; two stages of {self.tile} take {needed:,}"
        for value in epilogue_of(site).operands:
            if not value.column and value.type.dtype != dtype:
                return f"reads tiles of the dtype that it multiplies, {dtype}; it is given {value}"
        return None

    def rank(self, site: Site) -> int:
        # Where nothing was measured: before Triton, whose epilogue runs while its tensor cores wait.
        return 0

    def variants(self, site: Site) -> tuple[Kernel, ...]:
        tiles = (replace(tile, swizzle=s, raster=r) for tile in CANDIDATES for s, r in WALKS)
        return tuple(replace(self, tile=tile) for tile in tiles)

    def padding(self, site: Site, rows: int) -> float:
        assert isinstance(site.node.op, Product)
        tiles = whole_tiles(rows, self.tile.m) * whole_tiles(site.node.op.extent(site.inputs[1])[0], self.tile.n)
        count = site.node.op.arity - 1
        return (tiles + count - 1) / count  # the library's products count as they are

    def between(self, site: Site) -> tuple[TensorType, ...]:
        _, products = split(epilogue_of(site))
        return tuple(type for product in products for type in [product.into.type] * (1 if product.kept else 2))

    def render(self, site: Site) -> Rendered:
        whole, op = epilogue_of(site), site.node.op
        assert isinstance(op, Product)
        epilogue, products = split(whole)
        outside = _described(custom_op(site, whole), site, epilogue, products, op.layout)
        compiled = replace(self.tile, swizzle=1, raster=0)  # one source for every walk
        source = _source(outside, epilogue, compiled, op.layout, header(site, whole, "// "))
        pointers = [f"{value.name}.data_ptr()" for value in (*epilogue.inputs, *epilogue.outputs)]
        count = len(pointers) + len(ENVIRONMENT)
        library = tuple(product.code(epilogue, op.layout) for product in products)
        launcher = LauncherContext(outside, self.tile, count, flowed(", ".join(pointers) + ",", " " * 8), library)
        files: dict[str, tuple[str, object]] = {
            f"{outside.symbol}.cu": (source.TEMPLATE, source),
            f"{outside.symbol}.py": (launcher.TEMPLATE, launcher),
        }
        names = ", ".join(product.into.name for product in products)
        words = f"{names} by the library; {self.tile}" if products else str(self.tile)
        return Rendered(outside.function, outside.symbol, files, words)


GEMM_EVT = GemmEvt("gemm_evt", "cutlass", frozenset({"wgmma", "tma"}))


def _described(
    op: CustomOp, site: Site, epilogue: Epilogue, products: tuple[GivenProduct, ...], layout: str
) -> CustomOp:
    """The op with a docstring that names the products of the library."""
    if not products:
        return op
    formulas = (*(product.formula(epilogue, layout) for product in products), *epilogue.formulas(layout))
    words = f"{len(products) + 1} products of one input, the last and an epilogue of {len(epilogue.outputs)} outputs"
    summary = flowed(f'"""{site.label}: {words} in one kernel.')
    return replace(op, summary=summary, formulas=tuple(flowed(line, "    ", "    ") for line in formulas))


def _source(op: CustomOp, epilogue: Epilogue, tile: GemmTile, layout: str, head: str) -> GemmContext:
    result = epilogue.results[0].value
    given = [f"void const* {value.name}" for value in epilogue.inputs] + [
        f"void* {value.name}" for value in epilogue.outputs
    ]
    names = [value.name for value in (*epilogue.inputs, *epilogue.outputs)]
    walk = ["int swizzle", "int raster"]
    nulls = ["m", "1", "0", *["nullptr"] * len(names)]
    functors = tuple(_functor(step, epilogue) for step in epilogue.steps if not _passes(step, epilogue))
    tree, arguments = _tree(epilogue) if len(epilogue.results) == 1 else _graph(epilogue)
    return GemmContext(
        op=op,
        tile=tile,
        header=head,
        formulas=tuple("\n".join(f"// {line}" for line in text.split("\n")) for text in op.formulas),
        element=ELEMENTS[epilogue.x.type.dtype],
        weight_layout=LAYOUTS[layout],
        reads_tiles=any(not value.column for value in epilogue.operands),
        reads_columns=any(value.column for value in epilogue.operands),
        writes_tiles=len(epilogue.results) > 1,
        prelude=cuda_functions(functor.value for functor in functors),
        functors=functors,
        result=result.name,
        tree=tree,
        tree_arguments=listed("Tree::Arguments const tree{", arguments, "};", 2, ""),
        pointers=listed("Gemm::Arguments arguments(", ["int m", *walk, *given], ") {", last=""),
        nulls=listed("return Gemm::get_workspace_size(arguments(", nulls, "));", 2, ""),
        entry=listed(f'extern "C" int {op.function}(', ["int m", *walk, *given, *ENVIRONMENT], ") {", last=""),
        arguments=", ".join(["m", "swizzle", "raster", *names]),
        weight=epilogue.weights[0].name,
    )


def _passes(step: Result, epilogue: Epilogue) -> bool:
    """Whether a further output is a value that is there anyway, and needs no functor."""
    return isinstance(step.expr, Var) and step is not epilogue.steps[-1]


def _struct(step: Result) -> str:
    return "Compute" + "".join(word.capitalize() for word in step.value.name.split("_"))


def _reads(step: Result, epilogue: Epilogue) -> tuple[str, ...]:
    """The arguments of a functor: accumulator, operands, earlier results."""
    read = variables(step.expr)
    known = (*epilogue.accumulators, *(value.name for value in (*epilogue.operands, *epilogue.outputs)))
    return tuple(name for name in known if name in read)


def _functor(step: Result, epilogue: Epilogue) -> Functor:
    fragments = _reads(step, epilogue)
    parameters = [f"Fragment const& {name}" for name in fragments]
    result = f"{step.value.name}_" if step.value.name in fragments else step.value.name
    return Functor(
        _struct(step),
        listed("__device__ Fragment operator()(", parameters, ") const {", 2, ""),
        result,
        flowed(f"{result}[i] = {cuda_text(step.expr, {name: f'{name}[i]' for name in fragments})};", "      ", "    "),
    )


def _tree(epilogue: Epilogue) -> tuple[str, list[str]]:
    """One output: a functor over its loads, and their arguments."""
    (step,) = epilogue.steps
    read = _reads(step, epilogue)
    loads = [value for value in epilogue.operands if value.name in read]
    leaves = ["fusion::Sm90AccFetch"] if epilogue.accumulators[0] in read else []
    nodes = [f"Compute<{_struct(step)}, Element>", *leaves, *map(_leaf, loads)]
    arguments = [*["{}"] * len(leaves), *map(_leaf_arguments, loads), "{}"]
    return listed("using Tree = fusion::Sm90EVT<", nodes, ">;", last=""), arguments


def _graph(epilogue: Epilogue) -> tuple[str, list[str]]:
    """Several outputs: what each node reads, every node once, the first output last; and their arguments."""
    nodes = ["fusion::Sm90AccFetch", *map(_leaf, epilogue.operands)]
    edges: list[tuple[int, ...]] = [()] * len(nodes)  # what each node reads
    arguments = ["{}", *map(_leaf_arguments, epilogue.operands)]
    places = {name: i for i, name in enumerate((*epilogue.accumulators, *(value.name for value in epilogue.operands)))}
    for step in epilogue.steps:
        last = step is epilogue.steps[-1]
        children = [places[name] for name in _reads(step, epilogue)]
        if not _passes(step, epilogue):
            edges.append(tuple(children))
            nodes.append(f"Compute<{_struct(step)}, Element>" if last else f"Compute<{_struct(step)}>")
            arguments.append("{}")
            children = [len(nodes) - 1]
        if not last:
            edges.append(tuple(children))
            nodes.append("TileStore")
            arguments.append(f"{{static_cast<Element*>({step.value.name}), stride_y}}")
            places[step.value.name] = len(nodes) - 1
    sequences = [f"cute::seq<{', '.join(map(str, edge))}>" for edge in edges]
    reads = listed("using Reads = cute::tuple<", sequences, ">;", last="")
    return (
        f"{reads}\n{listed('using Tree = fusion::Sm90TopologicalVisitor<', ['float', 'Reads', *nodes], '>;', last='')}",
        arguments,
    )


def _leaf(value: Value) -> str:
    return f"ColumnLoad<{ELEMENTS[value.type.dtype]}>" if value.column else "TileLoad"


def _leaf_arguments(value: Value) -> str:
    pointer = f"static_cast<{ELEMENTS[value.type.dtype]} const*>({value.name})"
    return f"{{{pointer}}}" if value.column else f"{{{pointer}, Element(0), stride_y}}"
