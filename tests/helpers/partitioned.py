"""What Torch's own compiler saves for the backward pass of a model, without a GPU."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes

from specc.compiler.spec.spec import Spec
from specc.runtime.dtypes import DTYPES
from specc.runtime.model.load import instantiate
from specc.runtime.optim.derived_weights import DerivedWeights

# gpt_mlp35 with 5 of its 11 blocks: two without changes, one of each kind of change, and one with both.
FIVE_BLOCKS = (
    "model.blocks.count=5",
    "model.blocks.changes.0.where=2 <= layer and layer < 4",
    "model.blocks.changes.0.read=mix.stream * (x + skip.scale * output(3 - layer)) + mix.embedded * x0",
    "model.blocks.changes.1.where=layer >= 3",
)


class _Partitioned(BaseException):
    """Ends the compilation after the partition. The kernels of a GPU cannot run."""


def partition(spec: Spec, target: str, folder: Path) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns the forward and the backward graph into which Torch's compiler divides the training program."""
    graphs: list[fx.GraphModule] = []

    def record(joint: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        joint_graph_passes(joint)
        graphs.extend(min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **settings))
        raise _Partitioned

    loaded = instantiate(spec, target, folder)
    for param in loaded.programs.params:
        tensor = loaded.model.get_parameter(param.name)
        tensor.data = tensor.data.to(DTYPES[param.dtype])
    DerivedWeights(loaded.model, loaded.programs.derived_weights)  # inputs, as in training
    keep = lambda graph, inputs: graph  # noqa: E731
    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=record, decompositions=select_decomp_table()
    )
    torch.compiler.reset()
    ids = torch.zeros(spec.train.at_once(), spec.model.window, dtype=torch.int64)
    with suppress(_Partitioned):
        torch.compile(loaded.model, fullgraph=True, dynamic=False, backend=backend)(ids, ids)
    forward, backward = graphs
    return forward, backward


def saved_bytes(forward: fx.GraphModule) -> int:
    """Returns the bytes of the results of a forward graph that are not its inputs: the loss, and what is saved."""
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    saved = (node for node in output.args[0] if isinstance(node, fx.Node) and node.op != "placeholder")
    values = (node.meta["val"] for node in saved)
    sizes = [value.numel() * value.element_size() for value in values if isinstance(value, Tensor)]
    return sum(size for size in sizes if isinstance(size, int))  # states of generators may have no known size
