"""Builds the program `logits` for exported files. The program contains the nodes of `score` that compute the logits."""

from dataclasses import replace

from specc.compiler.ir.graph import needed
from specc.compiler.ops.loss import CrossEntropy
from specc.compiler.programs.programs import Programs, flatten

SCORE, LOGITS = "score", "logits"


def with_logits(programs: Programs) -> Programs:
    """Returns the programs `score` and `logits`, without the programs for training and decoding.

    The inputs of `logits` are the inputs of `score` that the logits depend on. The output is one row of logits per
    token, f32 [B, T, V].

    Raises:
        ValueError: if an operation of `score` cannot be exported. The message states the place of the operation in the
            spec.
    """
    score = programs.program(SCORE)
    for node in flatten(programs, score).nodes:
        if node.op.unexportable:
            place = ".".join(map(str, programs.place(node.name)))
            raise ValueError(f"{place} has {node.op.unexportable}")
    loss = next(node for node in score.nodes if isinstance(node.op, CrossEntropy))
    nodes = needed(score.nodes, loss.inputs[:1])
    read = {ref for node in nodes for ref in node.inputs}
    logits = replace(
        score,
        name=LOGITS,
        inputs=tuple(entry for entry in score.inputs if entry[0] in read),
        params=tuple(entry for entry in score.params if f"@{entry[0]}" in read),
        nodes=nodes,
        outputs=((LOGITS, loss.inputs[0]),),
    )
    functions = programs.called_from((score,))
    return replace(programs, programs=(score, logits), functions=functions, whole=(SCORE, LOGITS), phases=())
