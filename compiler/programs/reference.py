"""The second check of a generated module. The program runs in float64 with a plain Torch reference of each op.
References share no code with generated modules."""

from collections.abc import Callable, Mapping, Sequence

from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ir.types import Tensor, Tensors
from specc.compiler.ops.region import Scan
from specc.compiler.programs.programs import Programs, flatten, scalar_values

# A function that is called with each node (under its full name), its inputs and its outputs.
Observe = Callable[[Node, list[Tensor], tuple[Tensor, ...]], None]


def run(
    programs: Programs,
    program: str,
    inputs: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    observe: Observe | None = None,
) -> dict[str, Tensor]:
    """Runs a program with the references of its ops, in the precision of `params`. `programs` must be the programs
    before fusion.

    Args:
        programs: The programs of the model.
        program: The name of the program to run.
        inputs: The inputs of the program, by name.
        params: The parameters, by name.
        observe: A function that is called with each node, its inputs and its outputs; see `Observe`.

    Returns:
        The outputs by label.
    """
    import torch

    dtype = next((tensor.dtype for tensor in params.values() if tensor.is_floating_point()), torch.float64)
    numbers = {
        f"${name}": torch.tensor(value, dtype=torch.float64)
        for name, value in scalar_values(programs.program(program)).items()
    }
    fixed = {**{f"@{name}": tensor for name, tensor in params.items()}, **numbers}

    def outputs_of(graph: Graph, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the outputs of a flattened graph by label.

        The outputs of a node have the precision of its inputs. A node such as sinusoidal positions has float outputs,
        but no float inputs. The outputs of such a node have the dtype of the parameters.
        """
        values = {**inputs, **fixed}
        for node in graph.nodes:
            operands = [values[ref] for ref in node.inputs]
            outputs = loop(node.op, operands) if isinstance(node.op, Scan) else node_value(node, operands)
            if not any(value.is_floating_point() for value in operands):
                outputs = tuple(value.to(dtype) if value.is_floating_point() else value for value in outputs)
            if observe is not None:
                observe(node, operands, outputs)
            values |= zip(node.outputs, outputs, strict=True)
        return {label: values[ref] for label, ref in graph.outputs}

    def loop(scan: Scan, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        step = flatten(programs, programs.function(scan.callee), at=scan.at)
        last = scan.carried + scan.stepped
        carried, stepped, others = inputs[: scan.carried], inputs[scan.carried : last], inputs[last:]
        rows: list[list[Tensor]] = []
        for t in range(stepped[0].shape[1]):
            operands = (*carried, *(sequence.narrow(1, t, 1) for sequence in stepped), *others)
            named = {name: value for (name, _), value in zip(step.inputs, operands, strict=True)}
            outputs = list(outputs_of(step, named).values())
            carried = outputs[: scan.carried]
            rows.append(outputs[scan.carried :])
        return *carried, *(torch.cat(outputs, 1) for outputs in zip(*rows, strict=True))

    return outputs_of(flatten(programs, programs.program(program)), inputs)


def node_value(node: Node, inputs: list[Tensor], every: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
    """Returns all outputs of one node, after its epilogue.

    `every` holds all rows of the inputs. `inputs` may be a sample of these rows. Outputs without rows, such as a sum
    over rows, are computed from `every`.
    """
    import torch

    def many(value: Tensors) -> tuple[Tensor, ...]:
        return (value,) if isinstance(value, torch.Tensor) else value

    every = inputs if every is None else every
    if node.epilogue is None:
        rowless = (i for i, type in enumerate(node.types) if not any(isinstance(dim, str) for dim in type.shape))
        return many(node.op.sampled(inputs, every, () if every is inputs else tuple(rowless)))
    arity = node.op.arity
    products = many(node.op.sampled(inputs[:arity], every[:arity]))
    return epilogue_value(node, (*products, *inputs[arity:]))


def epilogue_value(node: Node, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns the outputs of the epilogue of a node. `operands` are the accumulators of the node's op, followed by the
    other values that the epilogue reads. The first output is computed last, because its expression may read the other
    outputs."""
    from specc.compiler.expr import reread, torch_value
    from specc.compiler.ops.fp8_codes import codes_of
    from specc.compiler.ops.pointwise import Pointwise
    from specc.compiler.ops.quantized import rounded

    epilogue = node.epilogue
    assert isinstance(epilogue, Pointwise)
    values = epilogue.values(operands)
    labels = epilogue.labels or ("y",)
    saves = {
        label: torch_value(reread(text), values) for label, text in zip(labels[1:], epilogue.outputs[1:], strict=True)
    }
    value = torch_value(reread(epilogue.outputs[0]), {**values, **saves})
    results = [rounded(value) if node.type.dtype == "i8" else value, *saves.values()]
    states = dict(zip(epilogue.variables, operands, strict=True))
    for i, name, factor, _ in epilogue.codes:
        results[i] = codes_of(results[i], states[name], factor)
    return tuple(results)
