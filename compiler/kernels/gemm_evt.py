"""A product and its pointwise tail as a CUTLASS 3.x GEMM: one generated functor in its epilogue tree."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from specc.compiler.expr import cuda_text
from specc.compiler.kernels.custom_op import CustomOp, custom_op, header
from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.kernels.lines import flowed, listed
from specc.compiler.kernels.tail import Tail, Value, refusal, tail_of
from specc.compiler.ops.linear import Product

ELEMENTS = {"bf16": "cutlass::bfloat16_t", "f16": "cutlass::half_t", "f32": "float"}
ENVIRONMENT = ("void* workspace", "cudaStream_t stream")
LAYOUTS = {"nk": "ColumnMajor", "kn": "RowMajor"}  # of the weight as CUTLASS's B, which it takes as [K, N]


@dataclass(frozen=True, slots=True)
class GemmTile:
    """Outputs a thread block computes, blocks a cluster, and how the warps share the work."""

    m: int
    n: int
    k: int
    cluster: tuple[int, int]
    schedule: Literal["Pingpong", "Cooperative"]

    def __str__(self) -> str:
        shape = f"{self.m}x{self.n}x{self.k}, {self.schedule.lower()}"
        return f"{shape}, cluster {self.cluster[0]}x{self.cluster[1]}x1"

    @property
    def epilogue(self) -> str:
        """CUTLASS's name of the epilogue that goes with the schedule."""
        return {"Pingpong": "TmaWarpSpecialized", "Cooperative": "TmaWarpSpecializedCooperative"}[self.schedule]


PINGPONG = GemmTile(128, 128, 64, (2, 1), "Pingpong")
COOPERATIVE = GemmTile(128, 256, 64, (2, 1), "Cooperative")


@dataclass(frozen=True, slots=True)
class GemmContext:
    """What templates/cutlass/gemm_evt.cu.jinja may know.

    `compute` is the functor's signature and `value` what it computes; `tree` are the loads around it and
    `tree_arguments` what they load; `pointers` and `entry` are signatures, `nulls` and `arguments` calls.
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
    compute: str
    result: str
    value: str
    tree: str
    tree_arguments: str
    pointers: str
    nulls: str
    entry: str
    arguments: str


@dataclass(frozen=True, slots=True)
class LauncherContext:
    """What templates/cutlass/gemm_evt.py.jinja may know: the tensors that the compiled function takes and,
    with workspace and stream, how many pointers that makes."""

    TEMPLATE: ClassVar[str] = "cutlass/gemm_evt.py.jinja"
    op: CustomOp
    pointer_count: int
    pointers: str


@dataclass(frozen=True, slots=True)
class GemmEvt(Kernel):
    """Takes a product with one accumulator and one output, and any expression over tiles and columns."""

    tile: GemmTile = PINGPONG

    def rejects(self, site: Site) -> str | None:
        if reason := refusal(site):
            return reason
        if (count := site.node.op.arity - 1) != 1:
            return f"keeps one accumulator; this node has {count}"
        if (count := len(site.node.types)) != 1:
            return f"writes one output; this node has {count}"
        dtype = site.inputs[0].dtype
        if site.node.type.dtype != dtype:
            return f"writes the dtype that it multiplies, {dtype}; the output is {site.node.type.dtype}"
        for value in tail_of(site).operands:
            if not value.column and value.type.dtype != dtype:
                return f"reads tiles of the dtype that it multiplies, {dtype}; it is given {value}"
        return None

    def rank(self, site: Site) -> int:
        # Until tiles are measured: first for an input gradient, whose epilogue reads a tile, and last for a
        # forward, which Triton can write several outputs of. A [K, N] weight marks the gradient.
        assert isinstance(site.node.op, Product)
        return 0 if site.node.op.layout == "kn" else 2

    def render(self, site: Site) -> Rendered:
        tail, op = tail_of(site), site.node.op
        assert isinstance(op, Product)
        outside = custom_op(site, tail)
        source = _source(outside, tail, self.tile, op.layout, header(site, tail, "// "))
        pointers = [f"{value.name}.data_ptr()" for value in (*tail.inputs, *tail.outputs)]
        count = len(pointers) + len(ENVIRONMENT)
        launcher = LauncherContext(outside, count, flowed(", ".join(pointers) + ",", " " * 8))
        files: dict[str, tuple[str, object]] = {
            f"{outside.symbol}.cu": (source.TEMPLATE, source),
            f"{outside.symbol}.py": (launcher.TEMPLATE, launcher),
        }
        return Rendered(outside.function, outside.symbol, files, str(self.tile))


GEMM_EVT = GemmEvt("gemm_evt", "cutlass", frozenset({"wgmma", "tma"}))


def _source(op: CustomOp, tail: Tail, tile: GemmTile, layout: str, head: str) -> GemmContext:
    (accumulator,), (result,) = tail.accumulators, tail.results
    fragments = [accumulator, *(value.name for value in tail.operands)]
    parameters = [f"Fragment const& {name}" for name in fragments]
    leaves = ["fusion::Sm90AccFetch", *map(_leaf, tail.operands)]
    given = [f"void const* {value.name}" for value in tail.inputs] + [f"void* {result.value.name}"]
    names = [value.name for value in (*tail.inputs, *tail.outputs)]
    arguments = ["{}", *map(_leaf_arguments, tail.operands), "{}"]
    value = cuda_text(result.expr, {name: f"{name}[i]" for name in fragments})
    return GemmContext(
        op=op,
        tile=tile,
        header=head,
        formulas=tuple(flowed(line, "//     ", "    ") for line in tail.formulas(layout)),
        element=ELEMENTS[tail.x.type.dtype],
        weight_layout=LAYOUTS[layout],
        reads_tiles=any(not value.column for value in tail.operands),
        reads_columns=any(value.column for value in tail.operands),
        compute=listed("__device__ Fragment operator()(", parameters, ") const {", 2, ""),
        result=result.value.name,
        value=flowed(f"{result.value.name}[i] = {value};", "      ", "    "),
        tree=listed("using Tree = fusion::Sm90EVT<", ["Compute", *leaves], ">;", last=""),
        tree_arguments=listed("Tree::Arguments const tree{", arguments, "};", 2, ""),
        pointers=listed("Gemm::Arguments arguments(", ["int m", *given], ") {", last=""),
        nulls=", ".join(["m", *["nullptr"] * len(names)]),
        entry=listed(f'extern "C" int {op.function}(', ["int m", *given, *ENVIRONMENT], ") {", last=""),
        arguments=", ".join(["m", *names]),
    )


def _leaf(value: Value) -> str:
    return f"ColumnLoad<{ELEMENTS[value.type.dtype]}>" if value.column else "TileLoad"


def _leaf_arguments(value: Value) -> str:
    pointer = f"static_cast<{ELEMENTS[value.type.dtype]} const*>({value.name})"
    return f"{{{pointer}}}" if value.column else f"{{{pointer}, Element(0), stride_y}}"
