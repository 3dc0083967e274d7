"""A matrix product and its pointwise epilogue as a CUTLASS 3.x GEMM. The epilogue is a CUTLASS visitor tree with one
generated functor per output."""

from dataclasses import replace
from typing import ClassVar, Literal, NamedTuple

from specc.compiler.expr import Var, cuda_functions, cuda_text, variables
from specc.compiler.ir.types import TensorType
from specc.compiler.kernels.epilogue import Epilogue, Result, Value, epilogue_of, refusal
from specc.compiler.kernels.gemm.product import Product, product_function, product_of
from specc.compiler.kernels.gemm.split import split
from specc.compiler.kernels.generated import GeneratedFunction, cuda_files
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, lacks_memory
from specc.compiler.kernels.lines import flowed, listed
from specc.compiler.kernels.tile import LARGEST_SIDE, between, power, whole_tiles
from specc.compiler.records import record

ELEMENTS = {"bf16": "cutlass::bfloat16_t", "f16": "cutlass::half_t", "f32": "float"}
ENVIRONMENT = ("void* workspace", "cudaStream_t stream")
LAYOUTS = {"nk": "ColumnMajor", "kn": "RowMajor"}  # the layout of the weight as CUTLASS's operand B, [K, N]
WARPGROUP_ROWS, STEP = 64, 16  # rows that one warpgroup multiplies; n and k must be multiples of STEP
LARGEST_CLUSTER = 8  # thread blocks; supported on any GPU that has clusters
# CUTLASS's RasterOrderOptions; with the first option, CUTLASS chooses by the problem's shape
RASTERS = ("", "along M", "along N")


@record
class GemmTile:
    """The tile of a CUTLASS GEMM.

    Attributes:
        m: The number of output rows per thread block.
        n: The number of output columns per thread block.
        k: The number of elements of the reduction dim per iteration.
        cluster: Thread blocks per cluster, along M and N.
        schedule: CUTLASS's schedule, which divides the work among the warps.
        part: The part of a tile that the epilogue holds in shared memory at once. None leaves the choice to CUTLASS.
        swizzle: CUTLASS's swizzle, which changes the order in which thread blocks compute the output.
        raster: The direction in which thread blocks traverse the output, as an index into `RASTERS`.

    Raises:
        ValueError: If a field is out of its bounds.
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
            raise ValueError(f"n is {self.n}, but must be a multiple of {STEP}")
        for whole, part in zip((self.m, self.n), self.part or (), strict=False):
            between("part", part, STEP, whole)
            if whole % part:
                raise ValueError(f"part is {part}, but must divide {whole}")

    def __str__(self) -> str:
        shape = f"{self.m}x{self.n}x{self.k}, {self.schedule.lower()}"
        words = [f"{shape}, cluster {self.cluster[0]}x{self.cluster[1]}x1"]
        words += [f"epilogue {self.part[0]}x{self.part[1]}"] if self.part else []
        words += [f"swizzle {self.swizzle}"] if self.swizzle > 1 else []
        words += [RASTERS[self.raster]] if self.raster else []
        return ", ".join(words)

    @property
    def epilogue_schedule(self) -> str:
        return {"Pingpong": "TmaWarpSpecialized", "Cooperative": "TmaWarpSpecializedCooperative"}[self.schedule]

    @property
    def epilogue_tile(self) -> str:
        if self.part is None:
            return "collective::EpilogueTileAuto"
        return f"cute::Shape<cute::Int<{self.part[0]}>, cute::Int<{self.part[1]}>>"


SQUARE = (64, 64)
PINGPONG = GemmTile(128, 128, 64, (2, 1), "Pingpong")
COOPERATIVE = GemmTile(128, 256, 64, (2, 1), "Cooperative")
WALKS = ((1, 0), (1, 2), (2, 2))  # swizzle and raster, which are arguments of the compiled kernel
# Tiles worth compiling, most promising first. A pingpong tile belongs to one consumer warpgroup: at most 192 f32
# accumulators per thread fit next to the epilogue. In measurements, clusters of 1x2 and other cooperative tiles were
# never competitive.
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


class Functor(NamedTuple):
    """One expression of the epilogue, as a C++ struct for fp32 fragments. `signature` and `value` are whole lines."""

    name: str
    signature: str
    result: str
    value: str


class GemmContext(NamedTuple):
    """The context of templates/cutlass/gemm_evt.cu.jinja.

    Attributes:
        reads_tiles: Whether an operand is a tile [rows, N].
        reads_columns: Whether an operand is a vector [N].
        writes_tiles: Whether the epilogue tree stores outputs other than the first.
        prelude: Functions that the expressions call.
        functors: The functors that compute the outputs.
        result: The name of the first output.
        tree: The C++ type of the epilogue tree.
        tree_arguments: The arguments of the tree, including the tensor pointers.
        pointers: The signature of the function that assembles the GEMM's arguments.
        nulls: The statement that returns the workspace size. The size does not depend on the tensors, so the statement
            passes null pointers.
        entry: The signature of the C entry point.
        arguments: The arguments that the entry point passes to the kernel.
        weight: The name of the weight.
    """

    op: GeneratedFunction
    product: Product
    tile: GemmTile
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


class LauncherContext(NamedTuple):
    """The context of templates/cutlass/gemm_evt.py.jinja.

    Attributes:
        pointer_count: The number of pointers that the compiled function accepts, including workspace and stream.
        pointers: The tensor pointers that are passed to the compiled function.
        library: Lines before the kernel call. Library calls compute all products except the last.
    """

    op: GeneratedFunction
    product: Product
    tile: GemmTile
    pointer_count: int
    pointers: str
    library: tuple[str, ...]


@record
class GemmEvt(Kernel):
    """Accepts one or more matrix products of the same rows, with any number of outputs. The epilogue may read operands
    [rows, N] and vectors [N].

    The kernel computes the last product, and library calls compute the other products. Separate products are faster
    than two accumulators in one kernel. For two products of 98,304 x 512 x 1792 with three outputs on an H200, the
    products alone take 0.54 ms. Triton's single kernel takes 0.92 ms.
    """

    # Without measurements, this kernel ranks before the Triton kernel, in which tensor cores idle during the epilogue.
    RANK: ClassVar[int] = 0
    TILE: ClassVar[type | None] = GemmTile
    tile: GemmTile = PINGPONG

    def rejects(self, site: Site) -> str | None:
        if reason := refusal(site):
            return reason
        if site.epilogue is not None and site.epilogue.draws:
            return "cannot compute dropout, because its epilogue does not know the row and column of an element"
        if site.epilogue is not None and (site.epilogue.codes or site.epilogue.scales):
            return "cannot round to 8 bits, because its epilogue neither reads scales nor records magnitudes"
        dtype = site.inputs[0].dtype
        if other := next((type.dtype for type in site.node.types if type.dtype != dtype), None):
            return f"writes the dtype that it multiplies, {dtype}; an output is {other}"
        # Producer and consumer need at least two stages. A value has 2 bytes.
        needed = 4 * self.tile.k * (self.tile.m + self.tile.n)
        if reason := lacks_memory(site, needed, f"two stages of {self.tile}"):
            return reason
        for value in epilogue_of(site).operands:
            if not value.column and value.type.dtype != dtype:
                return f"reads tiles of the dtype that it multiplies, {dtype}; it is given {value}"
        return None

    def variants(self, site: Site) -> tuple[Kernel, ...]:
        tiles = (replace(tile, swizzle=s, raster=r) for tile in CANDIDATES for s, r in WALKS)
        return tuple(replace(self, tile=tile) for tile in tiles)

    def padding(self, site: Site, rows: int) -> float:
        epilogue = epilogue_of(site)
        tiles = whole_tiles(rows, self.tile.m) * whole_tiles(epilogue.n, self.tile.n)
        count = len(epilogue.weights)
        return (tiles + count - 1) / count  # products that the library computes are counted without padding

    def between(self, site: Site) -> tuple[TensorType, ...]:
        _, products = split(epilogue_of(site))
        return tuple(type for product in products for type in [product.into.type] * (1 if product.is_output else 2))

    def render(self, site: Site) -> Rendered:
        whole = epilogue_of(site)
        epilogue, products = split(whole)
        op, product = product_function(site, whole), product_of(whole)
        if products:
            outputs = f"an epilogue of {len(epilogue.outputs)} outputs"
            words = f"{len(products) + 1} products of one input, the last and {outputs}"
            formulas = [*(other.formula(epilogue) for other in products), *epilogue.formulas]
            op = product_function(site, whole, words, formulas)
        compiled = replace(self.tile, swizzle=1, raster=0)  # the source is the same for every swizzle and raster
        pointers = [f"{value.name}.data_ptr()" for value in (*epilogue.inputs, *epilogue.outputs)]
        count = len(pointers) + len(ENVIRONMENT)
        library = tuple(other.code(epilogue) for other in products)
        launcher = LauncherContext(op, product, self.tile, count, flowed(", ".join(pointers) + ",", " " * 8), library)
        source = ("cutlass/gemm_evt.cu.jinja", _source(op, product, epilogue, compiled))
        names = ", ".join(other.into.name for other in products)
        tile = f"{names} by the library; {self.tile}" if products else str(self.tile)
        return cuda_files(op, source, ("cutlass/gemm_evt.py.jinja", launcher), tile)


GEMM_EVT = GemmEvt("gemm_evt", "cutlass", frozenset({"wgmma", "tma"}))


def _source(op: GeneratedFunction, product: Product, epilogue: Epilogue, tile: GemmTile) -> GemmContext:
    result = epilogue.results[0].value
    pointers = [f"void const* {value.name}" for value in epilogue.inputs]
    pointers += [f"void* {value.name}" for value in epilogue.outputs]
    names = [value.name for value in (*epilogue.inputs, *epilogue.outputs)]
    walk = ["int swizzle", "int raster"]
    nulls = ["m", "1", "0", *["nullptr"] * len(names)]
    functors = tuple(_functor(step, epilogue) for step in epilogue.steps if not _passes(step, epilogue))
    tree, arguments = _tree(epilogue) if len(epilogue.results) == 1 else _graph(epilogue)
    return GemmContext(
        op=op,
        product=product,
        tile=tile,
        element=ELEMENTS[epilogue.x.type.dtype],
        weight_layout=LAYOUTS[epilogue.layout],
        reads_tiles=any(not value.column for value in epilogue.operands),
        reads_columns=any(value.column for value in epilogue.operands),
        writes_tiles=len(epilogue.results) > 1,
        prelude=cuda_functions(functor.value for functor in functors),
        functors=functors,
        result=result.name,
        tree=tree,
        tree_arguments=listed("Tree::Arguments const tree{", arguments, "};", 2, ""),
        pointers=listed("Gemm::Arguments arguments(", ["int m", *walk, *pointers], ") {", last=""),
        nulls=listed("return Gemm::get_workspace_size(arguments(", nulls, "));", 2, ""),
        entry=listed(f'extern "C" int {op.function}(', ["int m", *walk, *pointers, *ENVIRONMENT], ") {", last=""),
        arguments=", ".join(["m", "swizzle", "raster", *names]),
        weight=epilogue.weights[0].name,
    )


def _passes(step: Result, epilogue: Epilogue) -> bool:
    """Returns whether an output needs no functor, because the output equals the accumulator or an earlier output."""
    return isinstance(step.expr, Var) and step is not epilogue.steps[-1]


def _struct(step: Result) -> str:
    return "Compute" + "".join(word.capitalize() for word in step.value.name.split("_"))


def _reads(step: Result, epilogue: Epilogue) -> tuple[str, ...]:
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
    (step,) = epilogue.steps
    read = _reads(step, epilogue)
    loads = [value for value in epilogue.operands if value.name in read]
    leaves = ["fusion::Sm90AccFetch"] if epilogue.accumulators[0] in read else []
    nodes = [f"Compute<{_struct(step)}, Element>", *leaves, *map(_leaf, loads)]
    arguments = [*["{}"] * len(leaves), *map(_leaf_arguments, loads), "{}"]
    return listed("using Tree = fusion::Sm90EVT<", nodes, ">;", last=""), arguments


def _graph(epilogue: Epilogue) -> tuple[str, list[str]]:
    """Returns the C++ type and the arguments of the CUTLASS visitor for an epilogue with several outputs. The type
    lists each node of the epilogue once, with the nodes that this node reads. The last node computes the first
    output."""
    nodes = ["fusion::Sm90AccFetch", *map(_leaf, epilogue.operands)]
    edges: list[tuple[int, ...]] = [()] * len(nodes)  # for each node, the nodes that it reads
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
