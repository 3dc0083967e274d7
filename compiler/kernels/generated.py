"""The names, signatures and descriptions of generated Python functions."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from specc.compiler.expr.python_lines import WIDTH
from specc.compiler.ir.types import Dim, TensorType
from specc.compiler.kernels.kernel import Rendered, Site, symbol
from specc.compiler.kernels.lines import HEADER, flowed, listed, unbroken

TRITON_DTYPES = {"bf16": "tl.bfloat16", "f16": "tl.float16", "f32": "tl.float32"}
TRITON_DTYPES |= {"e4m3": "tl.float8e4nv", "e5m2": "tl.float8e5"}
Tensors = Mapping[str, TensorType]  # the types of a function's inputs or outputs, in order, by name


class GeneratedFunction(NamedTuple):
    """The fields that all kernel templates share. Code fields contain whole lines.

    Attributes:
        header: Comment lines with the label and the types. The renderer appends the plan key to the last line.
        summary: The first line of the module's docstring, with opening quotes.
        formulas: The formula of each computed value, as lines of a docstring.
        target: The name of the target.
        namespace: The namespace of the custom op.
        node: The node's path, for error messages.
        function: The name of the function.
        symbol: The name of the module.
        signature: The first line of the function.
        fake_signature: The first line of the fake implementation, which has the same parameters as the function.
        launch_signature: The first line of the function that launches the kernel.
        launch: The call of the launch function.
        promise: The first sentence of the function's docstring, with opening quotes.
    """

    header: str
    summary: str
    formulas: tuple[str, ...]
    target: str
    namespace: str
    node: str
    function: str
    symbol: str
    signature: str
    fake_signature: str
    launch_signature: str
    launch: str
    promise: str

    @property
    def cuda_header(self) -> str:
        return self.header.replace("# ", "// ", 1).replace("\n# ", "\n// ")

    @property
    def cuda_formulas(self) -> tuple[str, ...]:
        return tuple("\n".join(f"// {line}" for line in text.split("\n")) for text in self.formulas)


def generated_function(
    site: Site,
    inputs: Tensors,
    outputs: Tensors,
    shapes: Mapping[str, str],
    summary: str,
    formulas: Iterable[str],
    label: str = "",
    omitted: Collection[str] = (),
    launched: Sequence[str] = (),
) -> GeneratedFunction:
    """Returns the description of the generated function of a kernel.

    Args:
        site: The node that the kernel computes.
        inputs: The types of the parameters.
        outputs: The types of the results.
        shapes: The shape of each input and output as text, such as `[..., T, 8, 64]`.
        summary: The first sentence of the module's docstring.
        formulas: The formula of each computed value.
        label: The label in the header. By default, the label of the site.
        omitted: The names of the inputs that the header does not list.
        launched: The names of the tensors that the kernel reads and writes. By default, the names of the inputs and
            outputs.

    Returns:
        The description.
    """
    function, module = symbol(site)
    parameters = [f"{name}: Tensor" for name in inputs]
    annotation = f"tuple[{', '.join('Tensor' for _ in outputs)}]" if len(outputs) > 1 else "Tensor"
    tensors = launched or [*inputs, *outputs]
    types, shaped = [], []
    for values in (inputs, outputs):
        types.append(", ".join(unbroken(f"{name} {type}") for name, type in values.items() if name not in omitted))
        shaped.append(", ".join(f"{name} {shapes[name]} {type.dtype}" for name, type in values.items()))
    quotes = 3 if not site.target.arch else 0  # templates in plain Torch close the docstring on the same line
    return GeneratedFunction(
        header=flowed(f"{unbroken(f'{label or site.label}    ')}{' -> '.join(types)}", "# ", "    ", HEADER),
        summary=flowed(f'"""{summary}'),
        formulas=tuple(flowed(line, "    ", "    ", WIDTH - len("// ")) for line in formulas),
        target=site.target.name,
        namespace=f"specc_{site.module}",
        node=site.label,
        function=function,
        symbol=module,
        signature=listed(f"def {function}(", parameters, f") -> {annotation}:"),
        fake_signature=listed("def _(", parameters, f") -> {annotation}:"),
        launch_signature=listed("def launch(", [f"{name}: Tensor" for name in tensors], ") -> None:"),
        launch=listed("launch(", tensors, ")", indent=12),
        promise=flowed(f'"""{" -> ".join(shaped)}.', "    ", width=WIDTH - quotes),
    )


def number_of(dim: Dim) -> int:
    """Converts a dim to an int. The dim must be a number, not a symbol."""
    assert isinstance(dim, int)
    return dim


def constants(values: Mapping[str, int]) -> str:
    """Returns a Python statement that assigns the constants, such as `ROWS, WARPS = 32, 4`."""
    return f"{', '.join(values)} = {', '.join(map(str, values.values()))}"


def python_file(op: GeneratedFunction, template: str, context: object, tile: str = "") -> Rendered:
    """Returns a kernel that consists of one Python file.

    Args:
        op: The function that the file defines.
        template: The path of the template below templates/.
        context: The context of the template.
        tile: The tile, as text for PLAN.md.

    Returns:
        The kernel, with a file named after `op.symbol`.
    """
    return Rendered(op.function, op.symbol, {f"{op.symbol}.py": (template, context)}, tile)


def cuda_files(op: GeneratedFunction, source: tuple[str, object], launcher: tuple[str, object], tile: str) -> Rendered:
    """Returns a kernel that consists of a CUDA C++ file and the Python file that launches it.

    Args:
        op: The function that the Python file defines.
        source: The template and the context of the CUDA C++ file.
        launcher: The template and the context of the Python file.
        tile: The tile, as text for PLAN.md.

    Returns:
        The kernel, with two files named after `op.symbol`.
    """
    return Rendered(op.function, op.symbol, {f"{op.symbol}.cu": source, f"{op.symbol}.py": launcher}, tile)
