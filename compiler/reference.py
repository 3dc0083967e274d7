"""The second witness: runs a program from its ops' plain Torch references, in float64, sharing no code with what is
generated."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from specc.compiler.ir import Node
from specc.compiler.programs import Programs, flatten, scalar_values

if TYPE_CHECKING:
    from torch import Tensor


def run(
    programs: Programs, program: str, inputs: Mapping[str, "Tensor"], params: Mapping[str, "Tensor"]
) -> dict[str, "Tensor"]:
    """The outputs of a program by label, in the precision of `params`. The programs must not be fused."""
    import torch

    graph = flatten(programs, programs.program(program))
    numbers = {
        f"${name}": torch.tensor(value, dtype=torch.float64)
        for name, value in scalar_values(programs.program(program)).items()
    }
    values = {**inputs, **{f"@{name}": tensor for name, tensor in params.items()}, **numbers}
    for node in graph.nodes:
        values |= zip(node.outputs, node_value(node, [values[ref] for ref in node.inputs]), strict=True)
    return {label: values[ref] for label, ref in graph.outputs}


def node_value(node: Node, inputs: list["Tensor"]) -> tuple["Tensor", ...]:
    """All outputs of one node, its epilogue included."""
    import torch

    def many(value: "Tensor | tuple[Tensor, ...]") -> tuple["Tensor", ...]:
        return (value,) if isinstance(value, torch.Tensor) else value

    if node.epilogue is None:
        return many(node.op.reference(*inputs))
    arity = node.op.arity
    products = many(node.op.reference(*inputs[:arity]))
    return epilogue_value(node, (*products, *inputs[arity:]))


def epilogue_value(node: Node, operands: tuple["Tensor", ...]) -> tuple["Tensor", ...]:
    """An epilogue over its accumulators and operands: further outputs first, which the value may read."""
    from specc.compiler.expr import reread, torch_value
    from specc.compiler.ops.pointwise import Pointwise

    tail = node.epilogue
    assert isinstance(tail, Pointwise)
    values = dict(zip(tail.variables, operands, strict=True))
    labels = tail.labels or ("y",)
    saves = {label: torch_value(reread(text), values) for label, text in zip(labels[1:], tail.outputs[1:], strict=True)}
    return (torch_value(reread(tail.outputs[0]), {**values, **saves}), *saves.values())
