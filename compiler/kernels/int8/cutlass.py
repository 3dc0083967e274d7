"""The common part of CUTLASS kernels for int8 products: the functor and tree of the epilogue, and the C entry point."""

from collections.abc import Mapping
from typing import NamedTuple

from specc.compiler.expr import cuda_functions, cuda_text, variables
from specc.compiler.kernels.epilogue import Value
from specc.compiler.kernels.gemm.evt import ELEMENTS, ENVIRONMENT, Functor
from specc.compiler.kernels.generated import GeneratedFunction, cuda_files
from specc.compiler.kernels.int8.gemm import Int8Epilogue, Int8Function, int8_epilogue, int8_function
from specc.compiler.kernels.kernel import Rendered, Site
from specc.compiler.kernels.lines import flowed, listed
from specc.compiler.ops.quantized import LARGEST

OUTPUTS = {**ELEMENTS, "i8": "int8_t"}


class Int8Source(NamedTuple):
    """The context of the templates gemm_int8_sm80.cu.jinja and gemm_int8_sm90.cu.jinja in templates/cutlass.

    Attributes:
        tile: The sizes of the thread block.
        reads_tiles: Whether an operand is a tile [rows, N].
        prelude: Functions that the functor calls.
        functor: The epilogue as a C++ functor.
        tree: The C++ type of the epilogue tree. Its leaves are the values that the functor reads.
        tree_arguments: The arguments of the tree, including the tensor pointers.
        pointers: The signature of the function that assembles the GEMM's arguments.
        nulls: The statement that returns the workspace size. The size does not depend on the tensors, so the statement
            passes null pointers.
        entry: The signature of the C entry point.
        arguments: The arguments that the entry point passes to the kernel.
    """

    op: GeneratedFunction
    product: Int8Function
    tile: object
    arch: str
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


class Int8Launcher(NamedTuple):
    """The context of templates/cutlass/gemm_int8.py.jinja. The compiled function accepts `pointer_count` pointers: the
    tensors, the workspace and the stream."""

    op: GeneratedFunction
    product: Int8Function
    pointer_count: int
    pointers: str


def rendered(site: Site, template: str, tile: object, leaf: Mapping[str, str]) -> Rendered:
    """Returns the .cu and .py files of an int8 product.

    Args:
        site: The site of the product.
        template: The template of the .cu file.
        tile: The tile, passed to the templates.
        leaf: CUTLASS code by name. `evt` is the type of the epilogue tree. `sum` is the tree node of the integer sums.
            `column` and `tile` are format strings for a loaded operand, with the fields `element` (a C++ type) and
            `name`.

    Returns:
        The files, with the Python function that launches the kernel.
    """
    epilogue = int8_epilogue(site)
    product = int8_function(site, epilogue, "in one kernel")
    pointers = [f"{name}.data_ptr()" for name in (*epilogue.names, "y")]
    count = len(pointers) + len(ENVIRONMENT)
    launcher = Int8Launcher(product.op, product, count, flowed(", ".join(pointers) + ",", " " * 8))
    source = (template, _source(site, product, epilogue, tile, leaf))
    return cuda_files(product.op, source, ("cutlass/gemm_int8.py.jinja", launcher), str(tile))


def _source(
    site: Site, product: Int8Function, epilogue: Int8Epilogue, tile: object, leaf: Mapping[str, str]
) -> Int8Source:
    read = [value for value in epilogue.operands if value.name in variables(epilogue.expr)]
    functor = _functor(epilogue, read)
    names = [*epilogue.names, "y"]
    pointers = [*(f"void const* {name}" for name in epilogue.names), "void* y"]
    kinds = [f"{'Column' if v.column else 'Tile'}Load<{ELEMENTS[v.type.dtype]}>" for v in read]
    nodes = ["Compute<ComputeY, Element, float>", "Sum", *kinds]
    loads = [
        leaf["tile" if not v.column else "column"].format(element=ELEMENTS[v.type.dtype], name=v.name) for v in read
    ]
    arguments = [leaf["sum"], *loads, "{}"]
    return Int8Source(
        op=product.op,
        product=product,
        tile=tile,
        arch=site.target.nvcc,
        element=OUTPUTS[epilogue.y.type.dtype],
        reads_tiles=any(not value.column for value in read),
        prelude=cuda_functions([functor.value]),
        functor=functor,
        tree=listed(f"using Tree = fusion::{leaf['evt']}<", nodes, ">;", last=""),
        tree_arguments=listed("Tree::Arguments const tree{", arguments, "};", 2, ""),
        pointers=listed("Gemm::Arguments arguments(", ["int m", *pointers], ") {", last=""),
        nulls=listed("return Gemm::get_workspace_size(arguments(", ["m", *["nullptr"] * len(names)], "));", 2, ""),
        entry=listed(f'extern "C" int {product.op.function}(', ["int m", *pointers, *ENVIRONMENT], ") {", last=""),
        arguments=", ".join(["m", *names]),
    )


def _functor(epilogue: Int8Epilogue, read: list[Value]) -> Functor:
    fragments = ("p", *(value.name for value in read))
    text = cuda_text(epilogue.expr, {name: f"{name}[i]" for name in fragments})
    if epilogue.codes:
        text = f"rintf(fminf(fmaxf({text}, -{LARGEST}.0f), {LARGEST}.0f))"
    signature = listed(
        "__device__ Fragment operator()(", [f"Fragment const& {name}" for name in fragments], ") const {", 2, ""
    )
    return Functor("ComputeY", signature, "y", flowed(f"y[i] = {text};", "      ", "    "))
