"""The common part of the CUTLASS kernels of int8 products: the epilogue's functor and tree, and the C entry point."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from specc.compiler.expr import cuda_functions, cuda_text, variables
from specc.compiler.kernels.epilogue import Value
from specc.compiler.kernels.gemm.evt import ELEMENTS, ENVIRONMENT, Functor
from specc.compiler.kernels.int8.gemm import Int8Epilogue, Int8Function, int8_epilogue, int8_function
from specc.compiler.kernels.kernel import Rendered, Site
from specc.compiler.kernels.lines import flowed, listed
from specc.compiler.ops.quantized import LARGEST

OUTPUTS = {**ELEMENTS, "i8": "int8_t"}


@dataclass(frozen=True, slots=True)
class Int8Source:
    """The context of the templates gemm_int8_sm80.cu.jinja and gemm_int8_sm90.cu.jinja in templates/cutlass.

    Attributes:
        tile: The sizes of the thread block.
        reads_tiles: Whether an operand is a tile [rows, N].
        prelude: Functions that the functor calls.
        functor: The expression of the epilogue.
        tree: The type of the epilogue tree, with the values that the functor reads.
        tree_arguments: The arguments of the tree, with the pointers of its tensors.
        pointers: The signature of the function that assembles the GEMM's arguments.
        nulls: The call that returns the workspace size.
        entry: The signature of the C entry point.
        arguments: The arguments that the entry point passes on.
    """

    op: Int8Function
    tile: object
    header: str
    arch: str
    formulas: tuple[str, ...]
    element: str
    reads_tiles: bool
    prelude: str
    functor: Functor
    tree: str
    tree_arguments: str
    pointers: str
    nulls: str
    entry: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Int8Launcher:
    """The context of templates/cutlass/gemm_int8.py.jinja. `pointer_count` is the number of pointers that the compiled
    function accepts: the tensors, workspace and stream."""

    TEMPLATE: ClassVar[str] = "cutlass/gemm_int8.py.jinja"
    op: Int8Function
    tile: object
    tensors: str
    pointer_count: int
    pointers: str
    launch: str


def rendered(site: Site, template: str, tile: object, leaf: Mapping[str, str]) -> Rendered:
    """Returns the .cu and .py files of an int8 product.

    Args:
        site: The site of the product.
        template: The template of the .cu file.
        tile: The tile, passed to the templates.
        leaf: CUTLASS code by name: `evt` is the type of the tree, `sum` the arguments of the sums, and `column` and
            `tile` those of a loaded operand, as format strings over its `element` type and `name`.

    Returns:
        The files, with the Python function that launches the kernel.
    """
    epilogue = int8_epilogue(site)
    op = int8_function(site, epilogue)
    source = _source(site, op, epilogue, tile, leaf)
    names = (*epilogue.names, "y")
    pointers = ", ".join(f"{name}.data_ptr()" for name in names)
    launcher = Int8Launcher(
        op,
        tile,
        listed("def launch(", [f"{name}: Tensor" for name in names], ") -> None:"),
        len(names) + len(ENVIRONMENT),
        flowed(pointers + ",", " " * 8),
        listed("launch(", names, ")", indent=12),
    )
    files: dict[str, tuple[str, object]] = {
        f"{op.symbol}.cu": (template, source),
        f"{op.symbol}.py": (launcher.TEMPLATE, launcher),
    }
    return Rendered(op.function, op.symbol, files, str(tile))


def _source(site: Site, op: Int8Function, epilogue: Int8Epilogue, tile: object, leaf: Mapping[str, str]) -> Int8Source:
    read = [value for value in epilogue.operands if value.name in variables(epilogue.expr)]
    functor = _functor(epilogue, read)
    names = [*epilogue.names, "y"]
    given = [*(f"void const* {name}" for name in epilogue.names), "void* y"]
    kinds = [
        f"TileLoad<{ELEMENTS[v.type.dtype]}>" if not v.column else f"ColumnLoad<{ELEMENTS[v.type.dtype]}>" for v in read
    ]
    nodes = ["Compute<ComputeY, Element, float>", "Sum", *kinds]
    loads = [
        leaf["tile" if not v.column else "column"].format(element=ELEMENTS[v.type.dtype], name=v.name) for v in read
    ]
    arguments = [leaf["sum"], *loads, "{}"]
    return Int8Source(
        op=op,
        tile=tile,
        header=op.header.replace("# ", "// ", 1).replace("\n# ", "\n// "),
        arch=site.target.nvcc,
        formulas=tuple(flowed(line, "//     ", "    ") for line in epilogue.formulas),
        element=OUTPUTS[epilogue.y.type.dtype],
        reads_tiles=any(not value.column for value in read),
        prelude=cuda_functions([functor.value]),
        functor=functor,
        tree=listed(f"using Tree = fusion::{leaf['evt']}<", nodes, ">;", last=""),
        tree_arguments=listed("Tree::Arguments const tree{", arguments, "};", 2, ""),
        pointers=listed("Gemm::Arguments arguments(", ["int m", *given], ") {", last=""),
        nulls=listed("return Gemm::get_workspace_size(arguments(", ["m", *["nullptr"] * len(names)], "));", 2, ""),
        entry=listed(f'extern "C" int {op.function}(', ["int m", *given, *ENVIRONMENT], ") {", last=""),
        arguments=", ".join(["m", *names]),
    )


def _functor(epilogue: Int8Epilogue, read: list[Value]) -> Functor:
    fragments = ("p", *(value.name for value in read))
    text = cuda_text(epilogue.expr, {name: f"{name}[i]" for name in fragments})
    if epilogue.codes:
        text = f"rintf(fminf(fmaxf({text}, -{LARGEST}.0f), {LARGEST}.0f))"
    return Functor(
        "ComputeY",
        listed(
            "__device__ Fragment operator()(", [f"Fragment const& {name}" for name in fragments], ") const {", 2, ""
        ),
        "y",
        flowed(f"y[i] = {text};", "      ", "    "),
    )
