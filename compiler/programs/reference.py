"""The second witness: runs a program from its ops' plain Torch references, in float64, sharing no code with what is
generated."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ops.region import Scan
from specc.compiler.programs.programs import Programs, flatten, scalar_values

if TYPE_CHECKING:
    from torch import Tensor, dtype


# Is told of each node, under its full name, what went in and what came out.
Observe = Callable[[Node, list["Tensor"], tuple["Tensor", ...]], None]


def run(
    programs: Programs,
    program: str,
    inputs: Mapping[str, "Tensor"],
    params: Mapping[str, "Tensor"],
    observe: Observe | None = None,
) -> dict[str, "Tensor"]:
    """The outputs of a program by label, in the precision of `params`. The programs must not be fused."""
    import torch

    graph = flatten(programs, programs.program(program))
    dtype = next((tensor.dtype for tensor in params.values() if tensor.is_floating_point()), torch.float64)
    numbers = {
        f"${name}": torch.tensor(value, dtype=torch.float64)
        for name, value in scalar_values(programs.program(program)).items()
    }
    fixed = {**{f"@{name}": tensor for name, tensor in params.items()}, **numbers}
    return _outputs(programs, graph, inputs, fixed, observe, dtype)


def _outputs(
    programs: Programs,
    graph: Graph,
    inputs: Mapping[str, "Tensor"],
    fixed: Mapping[str, "Tensor"],
    observe: Observe | None,
    dtype: "dtype",
) -> dict[str, "Tensor"]:
    """The outputs of a flattened graph by label; `fixed` are parameters and numbers. Floats that are made of whole
    numbers alone, as waves are, have no precision to go on with and get that of `dtype`."""
    values = {**inputs, **fixed}
    for node in graph.nodes:
        given = [values[ref] for ref in node.inputs]
        if isinstance(node.op, Scan):
            made = _loop(programs, node.op, given, fixed, observe, dtype)
        else:
            made = node_value(node, given)
        if not any(value.is_floating_point() for value in given):
            made = tuple(value.to(dtype) if value.is_floating_point() else value for value in made)
        if observe is not None:
            observe(node, given, made)
        values |= zip(node.outputs, made, strict=True)
    return {label: values[ref] for label, ref in graph.outputs}


def _loop(
    programs: Programs,
    scan: Scan,
    inputs: list["Tensor"],
    fixed: Mapping[str, "Tensor"],
    observe: Observe | None,
    dtype: "dtype",
) -> tuple["Tensor", ...]:
    """A loop over time, step by step."""
    import torch

    step = flatten(programs, programs.function(scan.callee), at=scan.at)
    last = scan.carried + scan.stepped
    carried, stepped, others = inputs[: scan.carried], inputs[scan.carried : last], inputs[last:]
    rows: list[list[Tensor]] = []
    for t in range(stepped[0].shape[1]):
        given = (*carried, *(sequence.narrow(1, t, 1) for sequence in stepped), *others)
        named = {name: value for (name, _), value in zip(step.inputs, given, strict=True)}
        made = list(_outputs(programs, step, named, fixed, observe, dtype).values())
        carried = made[: scan.carried]
        rows.append(made[scan.carried :])
    return *carried, *(torch.cat(outputs, 1) for outputs in zip(*rows, strict=True))


def node_value(node: Node, inputs: list["Tensor"], every: Sequence["Tensor"] | None = None) -> tuple["Tensor", ...]:
    """All outputs of one node, its epilogue included. `inputs` may be a sample of the rows of `every`; an output
    without rows, such as a sum over them, is that of `every`."""
    import torch

    def many(value: "Tensor | tuple[Tensor, ...]") -> tuple["Tensor", ...]:
        return (value,) if isinstance(value, torch.Tensor) else value

    every = inputs if every is None else every
    if node.epilogue is None:
        rowless = (i for i, type in enumerate(node.types) if not any(isinstance(dim, str) for dim in type.shape))
        return many(node.op.sampled(inputs, every, () if every is inputs else tuple(rowless)))
    arity = node.op.arity
    products = many(node.op.sampled(inputs[:arity], every[:arity]))
    return epilogue_value(node, (*products, *inputs[arity:]))


def epilogue_value(node: Node, operands: tuple["Tensor", ...]) -> tuple["Tensor", ...]:
    """An epilogue over its accumulators and operands: further outputs first, which the value may read."""
    from specc.compiler.expr import reread, torch_value
    from specc.compiler.ops.pointwise import Pointwise
    from specc.compiler.ops.quantized import rounded

    epilogue = node.epilogue
    assert isinstance(epilogue, Pointwise)
    values = dict(zip(epilogue.variables, operands, strict=True))
    labels = epilogue.labels or ("y",)
    saves = {
        label: torch_value(reread(text), values) for label, text in zip(labels[1:], epilogue.outputs[1:], strict=True)
    }
    value = torch_value(reread(epilogue.outputs[0]), {**values, **saves})
    return (rounded(value) if node.type.dtype == "i8" else value, *saves.values())
