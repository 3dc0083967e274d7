"""The Python side of a kernel, the same for every language: a custom op that checks, allocates and launches."""

from collections.abc import Iterable
from dataclasses import dataclass

from specc.compiler.kernels.epilogue import Epilogue, Value
from specc.compiler.kernels.kernel import Site, symbol
from specc.compiler.kernels.lines import flowed, listed, unbroken
from specc.compiler.ops.linear import Product

DTYPES = {"bf16": "torch.bfloat16", "f16": "torch.float16", "f32": "torch.float32"}


@dataclass(frozen=True, slots=True)
class CustomOp:
    """The template context of the Python op around a kernel. Fields with code hold whole indented lines.

    Attributes:
        header: Comment lines with label and types.
        formulas: What the op computes, one line per value.
        x: The input whose rows and device the other inputs must share.
        promise: The docstring of the op.
        wanted: Rows of the table of input checks.
        allocated: Lines that allocate the outputs.
    """

    header: str
    summary: str
    formulas: tuple[str, ...]
    target: str
    namespace: str
    node: str
    function: str
    symbol: str
    n: int
    k: int
    x: str
    signature: str
    promise: str
    wanted: tuple[str, ...]
    allocated: tuple[str, ...]
    launch: str
    launch_signature: str
    result: str


def custom_op(site: Site, epilogue: Epilogue) -> CustomOp:
    """Returns the op of a site: x [..., K] with any leading dims, weights and operands -> outputs [..., N]."""
    op = site.node.op
    assert isinstance(op, Product)
    n, k = op.extent(site.inputs[1])
    function, file = symbol(site)
    tensors = [value.name for value in (*epilogue.inputs, *epilogue.outputs)]
    returned = ["Tensor"] * len(epilogue.outputs)
    annotation = returned[0] if len(returned) == 1 else f"tuple[{', '.join(returned)}]"
    return CustomOp(
        header=header(site, epilogue, "# "),
        summary=_summary(site, epilogue),
        formulas=tuple(flowed(line, "    ", "    ") for line in epilogue.formulas(op.layout)),
        target=site.target.name,
        namespace=f"specc_{site.module}",
        node=site.label,
        function=function,
        symbol=file,
        n=n,
        k=k,
        x=epilogue.x.name,
        signature=listed(
            f"def {function}(", [f"{value.name}: Tensor" for value in epilogue.inputs], f") -> {annotation}:"
        ),
        promise=_promise(epilogue, op, n, k),
        wanted=tuple(_wanted(value, _shape(value, epilogue, op, "*rows", "N", "K")) for value in epilogue.inputs),
        allocated=tuple(_allocated(value, epilogue.x) for value in epilogue.outputs),
        launch=listed("launch(", tensors, ")", indent=12),
        launch_signature=listed("def launch(", [f"{name}: Tensor" for name in tensors], ") -> None:"),
        result=", ".join(value.name for value in epilogue.outputs),
    )


def header(site: Site, epilogue: Epilogue, mark: str) -> str:
    """Returns label and types as comment lines that leave room for the plan key after the last one."""
    label = unbroken(f"{site.label}    ")
    return flowed(f"{label}{_joined(epilogue.inputs)} -> {_joined(epilogue.outputs)}", mark, "    ", 88)


def _joined(values: Iterable[object]) -> str:
    return ", ".join(unbroken(str(value)) for value in values)


def _summary(site: Site, epilogue: Epilogue) -> str:
    """Returns the first line of the module's docstring, with its opening quotes."""
    products = "product" if len(epilogue.weights) == 1 else f"{len(epilogue.weights)} products of one input"
    outputs = "" if len(epilogue.outputs) == 1 else f" of {len(epilogue.outputs)} outputs"
    return flowed(f'"""{site.label}: {products} and epilogue{outputs} in one kernel.')


def _promise(epilogue: Epilogue, op: Product, n: int, k: int) -> str:
    """Returns the docstring of the op, with its opening quotes."""
    shapes = {value.name: _shape(value, epilogue, op, "...", str(n), str(k)) for value in epilogue.inputs}
    inputs = [f"{v.name} [{', '.join(shapes[v.name])}] {v.type.dtype}" for v in epilogue.inputs]
    outputs = [f"{value.name} [..., {n}] {value.type.dtype}" for value in epilogue.outputs]
    return flowed(f'"""{_joined(inputs)} -> {_joined(outputs)}.', "    ")


def _shape(value: Value, epilogue: Epilogue, op: Product, rows: str, n: str, k: str) -> tuple[str, ...]:
    """Returns the dims of an input as text, with `rows`, `n` and `k` for the dims rows, N and K."""
    if value is epilogue.x:
        return rows, k
    if value in epilogue.weights:
        return (n, k) if op.layout == "nk" else (k, n)
    return (n,) if value.column else (rows, n)


def _wanted(value: Value, shape: tuple[str, ...]) -> str:
    dims = ", ".join(shape) + ("," if len(shape) == 1 else "")
    return f'("{value.name}", {value.name}, ({dims}), {DTYPES[value.type.dtype]}),'


def _allocated(value: Value, like: Value) -> str:
    dtype = "" if value.type.dtype == like.type.dtype else f", dtype={DTYPES[value.type.dtype]}"
    return f"{value.name} = {like.name}.new_empty(*rows, N{dtype})"
