"""Int8 matrix products with epilogues: the code that all kernels share, and a plain Torch kernel for any CPU."""

from typing import ClassVar, NamedTuple

from specc.compiler.expr import Expr, ExprError, Var, cuda_text, reread, substitute, torch_text, variables
from specc.compiler.ir.builder import underscored
from specc.compiler.ir.types import DTYPES
from specc.compiler.kernels.epilogue import FLOATS, RESERVED, Value
from specc.compiler.kernels.generated import GeneratedFunction, generated_function, python_file
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, unless_cpu
from specc.compiler.kernels.lines import listed, nested
from specc.compiler.ops.quantized import ALIGNMENT, LARGEST, Int8Linear

OUTPUTS = (*FLOATS, "i8")
FIXED = ("x", "w", "offset", "y")
LONGEST_LABEL = 64


class Int8Epilogue(NamedTuple):
    """An int8 matrix product and its epilogue. The product is p = x w^T + offset in int32, for x i8 [rows, K], w i8 [N,
    K] and offset i32 [N]. `expr` computes y [rows, N] from p and the operands."""

    n: int
    k: int
    operands: tuple[Value, ...]
    y: Value
    expr: Expr

    @property
    def names(self) -> tuple[str, ...]:
        return ("x", "w", "offset", *(value.name for value in self.operands))

    @property
    def codes(self) -> bool:
        """Whether the output is rounded to int8 codes."""
        return self.y.type.dtype == "i8"

    @property
    def formulas(self) -> tuple[str, str]:
        rounded = f"round({self.expr}), within -{LARGEST} and {LARGEST}" if self.codes else str(self.expr)
        return "p = x w^T + offset, in int32", f"y = {rounded}"


def int8_epilogue(site: Site) -> Int8Epilogue:
    """Returns the epilogue of a site for which `int8_refusal` is None."""
    op, epilogue = site.node.op, site.epilogue
    assert isinstance(op, Int8Linear) and epilogue is not None
    n, k = op.extent(site.inputs[1])
    taken = {*FIXED, "p"}
    named: dict[str, Expr] = {epilogue.variables[0]: Var("p")}
    operands = []
    for variable, type in site.operands:
        name = underscored(variable, taken, RESERVED - {"scale"})
        named[variable] = Var(name)
        operands.append(Value(name, type))
    expr = substitute(reread(epilogue.outputs[0]), named)
    return Int8Epilogue(n, k, tuple(operands), Value("y", site.node.type), expr)


def int8_refusal(site: Site) -> str | None:
    """Returns a reason why no kernel accepts the product. Returns None if some kernel may accept the product."""
    op, epilogue = site.node.op, site.epilogue
    assert isinstance(op, Int8Linear)
    n, k = op.extent(site.inputs[1])
    if n % ALIGNMENT or k % ALIGNMENT:
        return f"needs N and K that are multiples of {ALIGNMENT}; N is {n} and K is {k}"
    if epilogue is None or len(epilogue.outputs) != 1:
        return "needs an epilogue with one output that scales the sums"
    if site.node.type.dtype not in OUTPUTS:
        return f"writes {', '.join(OUTPUTS)}; the output is {site.node.type.dtype}"
    for variable, type in site.operands:
        if type.shape not in (site.node.type.shape, (n,)):
            return f"reads operands of [{', '.join(map(str, site.node.type.shape))}] or [{n}]; {variable} is {type}"
        if type.dtype not in FLOATS:
            return f"reads operands in {', '.join(FLOATS)}; {variable} is {type.dtype}"
    expr = int8_epilogue(site).expr
    if "p" not in variables(expr):
        return "writes values computed from the sums; the epilogue does not read the sums"
    try:
        cuda_text(expr)
    except ExprError as error:
        return f"cannot print the epilogue: {error.message}"
    return None


class Int8Function(NamedTuple):
    """The Python function that launches a kernel. Fields with code contain whole lines.

    Attributes:
        op: The names, signatures and descriptions of the function.
        nodes: The paths of all nodes that call the function, as the text of a tuple. The error messages of `check`
            print these paths.
        check: The statement that checks the inputs.
        dtype: The dtype of y.
    """

    op: GeneratedFunction
    nodes: str
    n: int
    k: int
    check: str
    dtype: str


def int8_function(site: Site, epilogue: Int8Epilogue, made_by: str) -> Int8Function:
    """Returns the description of the generated function. The summary of the function ends with `made_by`, such as "in
    one kernel"."""
    n, k = epilogue.n, epilogue.k
    inputs = dict(zip(epilogue.names, site.inputs, strict=True))
    shapes = {"x": f"[..., {k}]", "w": f"[{n}, {k}]", "offset": f"[{n}]", "y": f"[..., {n}]"}
    shapes |= {value.name: f"[{n}]" if value.column else f"[..., {n}]" for value in epilogue.operands}
    label = short_label(site.label)
    words, outputs = f"{label}: int8 product and epilogue {made_by}.", {"y": epilogue.y.type}
    checked = ["NODES", "x", "w", "offset", "(N, K)"]
    for word, column in (("columns", True), ("tiles", False)):
        values = [value for value in epilogue.operands if value.column is column]
        pairs = ", ".join(f'"{v.name}": ({v.name}, {DTYPES[v.type.dtype]})' for v in values)
        checked += [f"{word}={{{pairs}}}"] if values else []
    return Int8Function(
        op=generated_function(site, inputs, outputs, shapes, words, epilogue.formulas, label, ("offset",)),
        nodes=nodes_of(site.label),
        n=n,
        k=k,
        check=listed("check_operands(", checked, ")", 4),
        dtype=DTYPES[epilogue.y.type.dtype],
    )


def nodes_of(label: str) -> str:
    """Returns the source line `NODES = (...)` with the node paths of a label. A label consists of paths joined with
    " and ". Text after a blank in a path, such as "+ act", is removed."""
    paths = [f'"{part.partition(" ")[0]}"' for part in label.split(" and ")]
    return listed("NODES = (", paths, ",)" if len(paths) == 1 else ")")


def short_label(label: str) -> str:
    """Returns the label for a file's header. If a label names many nodes, the result has the first node and the number
    of the remaining nodes. PLAN.md lists all nodes."""
    first, *more = label.split(" and ")
    return label if len(label) <= LONGEST_LABEL else f"{first} and {len(more)} more"


class TorchContext(NamedTuple):
    """The context of templates/torch/gemm_int8.py.jinja."""

    op: GeneratedFunction
    product: Int8Function
    operands: tuple[str, ...]
    value: str
    rounded: str
    uses_functional: bool


class Int8Torch(Kernel):
    """The product in exact integer arithmetic, and the epilogue in f32."""

    RANK: ClassVar[int] = 9

    def rejects(self, site: Site) -> str | None:
        apart = unless_cpu(site, "has no int8 product for few rows, and would run the epilogue as a separate kernel")
        return apart or int8_refusal(site)

    def render(self, site: Site) -> Rendered:
        epilogue = int8_epilogue(site)
        text = torch_text(epilogue.expr)
        wide = [value.name for value in epilogue.operands if value.type.dtype != "f32"]
        y = "" if epilogue.y.type.dtype == "f32" else f".to({DTYPES[epilogue.y.type.dtype]})"
        rounded = f".round().clamp(-{LARGEST}, {LARGEST})" if epilogue.codes else ""
        product = int8_function(site, epilogue, "in plain Torch")
        converted = tuple(f"{name} = {name}.float()" for name in wide)
        context = TorchContext(product.op, product, converted, nested("y", text), f"y{rounded}{y}", "F." in text)
        return python_file(product.op, "torch/gemm_int8.py.jinja", context)


GEMM_INT8_TORCH = Int8Torch("gemm_int8_torch", "torch", computes=Int8Linear)
