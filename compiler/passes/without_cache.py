"""Splits `score` into two programs for decoding without a cache. The first program reads the source. The second program
reads all tokens that were generated so far."""

from dataclasses import replace

from specc.compiler.ir.graph import Graph, Named, Node, needed, node_of
from specc.compiler.ops.loss import CrossEntropy
from specc.compiler.ops.region import Fused
from specc.compiler.ops.sequence import Shift
from specc.compiler.programs.programs import Programs

READ, WRITE = "encode", "logits"
SIDE = "decoder."  # the name prefix of nodes that a decoder without a cache recomputes for each token


def uncached(programs: Programs) -> Programs:
    """Returns the programs `score`, `encode` and `logits` of an encoder-decoder model. `encode` and `logits` are the
    halves of `score`.

    `encode` maps the source i64[B,S] to the state of the encoder. `encode` contains every node that depends only on
    the source and is not part of the decoder. `logits` maps this state and the decoder inputs i64[B,T] to logits
    f32[B,T,V]. `logits` contains the decoder, which also computes the keys and values of the source.

    Raises:
        ValueError: If `score` does not shift targets, does not contain a loss, or runs fused groups.
    """
    score = programs.program("score")
    shift = next((node for node in score.nodes if isinstance(node.op, Shift)), None)
    loss = next((node for node in score.nodes if isinstance(node.op, CrossEntropy)), None)
    if shift is None or loss is None or any(isinstance(node.op, Fused) for node in score.nodes):
        raise ValueError(f"the program score of {programs.name} cannot be split into encoder and decoder")
    logits = loss.inputs[0]
    read, write = _halves(score, shift)
    inside = {ref for node in write for ref in node.outputs}
    passed = dict.fromkeys(ref for node in write for ref in node.inputs if ref not in inside and ref[0] not in "@$")
    passed.pop(shift.outputs[0], None)
    names = {ref: f"v{i}" for i, ref in enumerate(passed)}
    nodes = needed(read, passed)
    types = score.types
    inputs = ((shift.outputs[0], shift.type), *((names[ref], types[ref]) for ref in passed))
    renamed = tuple(replace(node, inputs=tuple(names.get(ref, ref) for ref in node.inputs)) for node in write)
    halves = (
        _program(score, READ, score.inputs[:1], nodes, {f"state.encoder.{name}": ref for ref, name in names.items()}),
        _program(score, WRITE, inputs, needed(renamed, [logits]), {"logits": logits}),
    )
    functions = programs.called_from((score,))
    return replace(programs, programs=(score, *halves), functions=functions, whole=(score.name, WRITE))


def _halves(score: Graph, shift: Node) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Returns two lists of nodes of `score`, without the shift and the loss. The nodes of the first list do not depend
    on the generated tokens. The second list holds all other nodes."""
    written = {shift.name, score.inputs[1][0]}
    read, write = [], []
    for node in score.nodes:
        if node is shift or isinstance(node.op, CrossEntropy):
            continue
        if node.name.startswith(SIDE) or any(node_of(ref) in written for ref in node.inputs):
            written.add(node.name)
            write.append(node)
        else:
            read.append(node)
    return tuple(read), tuple(write)


def _program(
    score: Graph, name: str, inputs: tuple[Named, ...], nodes: tuple[Node, ...], outputs: dict[str, str]
) -> Graph:
    read = {ref for node in nodes for ref in node.inputs}
    params = tuple((path, type) for path, type in score.params if f"@{path}" in read)
    return Graph(name, inputs, params, nodes, tuple(outputs.items()), score.scalars)
