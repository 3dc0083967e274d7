"""Torch calls, as generated code contains them and torch.fx records them."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from specc.compiler.expr.python_lines import operand
from specc.compiler.ir.types import spelled
from specc.compiler.records import record


@record
class Input:
    """Input `index` of an op, in a `TorchCall`."""

    index: int


# Functions that generated code writes as operators, and the names under which torch.fx records them.
ARITHMETIC = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "**": "pow"}
COMPARISONS = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}
OPERATORS = {"[]": "getitem", ".": "getattr", "@": "matmul", **ARITHMETIC, **COMPARISONS}


@record
class TorchCall:
    """A Torch call, as generated code contains it and torch.fx records it.

    Attributes:
        function: A Torch function (`F.pad`), a method of the first argument (`.flip`), one of OPERATORS, or a support
            function (`rope_angles`), which is defined in templates/torch/<function>.py.jinja.
        args: The positional arguments: inputs of the op, other calls, and constants.
        keywords: The keyword arguments.
        generated: The template of the support function and the typed context of the template. None if the function is
            not a support function, or if its template has no context.
    """

    function: str
    args: tuple[object, ...]
    keywords: tuple[tuple[str, object], ...] = ()
    generated: tuple[str, Any] | None = None

    @property
    def recorded(self) -> str:
        return OPERATORS.get(self.function) or self.function.rpartition(".")[2]

    @property
    def support(self) -> str:
        """Returns the name of the support function of this call. If the function is not a support function, returns the
        name of the first support function in the arguments. The name is empty if there is none."""
        if self.function.isidentifier():
            return self.function
        return next((arg.support for arg in self.args if isinstance(arg, TorchCall) and arg.support), "")

    @property
    def supports(self) -> Iterator["TorchCall"]:
        """Yields all calls of support functions: this call, if its function is a support function, and the calls in its
        arguments."""
        if self.function.isidentifier():
            yield self
        for arg in self.args:
            for part in arg if isinstance(arg, tuple) else (arg,):
                if isinstance(part, TorchCall):
                    yield from part.supports

    def text(self, inputs: Sequence[str]) -> str:
        """Returns the call as Python source. `inputs` are the texts of the op's inputs."""
        first, *rest = (_source(arg, inputs) for arg in self.args)
        if self.function == "[]":
            index = self.args[1] if isinstance(self.args[1], tuple) else (self.args[1],)
            return f"{operand(first)}[{', '.join(_source(part, inputs) for part in index)}]"
        if self.function == ".":
            return f"{operand(first)}.{self.args[1]}"
        if self.function in OPERATORS:
            return f" {self.function} ".join(
                text if re.fullmatch(r"[\d.]+", text) else operand(text) for text in (first, *rest)
            )
        rest += [f"{name}={_source(value, inputs)}" for name, value in self.keywords]
        if self.function.startswith("."):
            return f"{operand(first)}{self.function}({', '.join(rest)})"
        return f"{self.function}({', '.join((first, *rest))})"


def _source(value: object, inputs: Sequence[str]) -> str:
    match value:
        case Input(index):
            return inputs[index]
        case TorchCall():
            return value.text(inputs)
        case slice(start=start, stop=stop):
            return ":".join("" if bound is None else _source(bound, inputs) for bound in (start, stop))
        case tuple():
            items = [_source(item, inputs) for item in value]
            return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
        case str():
            return f'"{value}"'
    return "..." if value is Ellipsis else spelled(value)
