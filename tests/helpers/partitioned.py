"""What Torch's own compiler saves for the backward pass of a model, without a GPU."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from run_samples import SPEC
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._higher_order_ops import wrap
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch.fx.traceback import preserve_node_meta
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import CheckpointPolicy

from specc.compiler.spec.check import load
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


def small_gpt(name: str, *overrides: str) -> Spec:
    """Returns a spec with fewer blocks, and rows of 256 tokens."""
    rows = ("train.micro_batch=16", "model.context=256", "train.tokens_per_step=4096")
    small = {"gpt2_124m": ("model.vocab=4096", "model.blocks.count=4"), "gpt_mlp35": FIVE_BLOCKS}[name]
    return load(SPEC.with_name(f"{name}.yaml"), (*rows, *small, *overrides))[0]


class _Partitioned(BaseException):
    """Ends the compilation after the partition. The kernels of a GPU cannot run."""


def tag_as_in_torch_2_11(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks what is recomputed as Torch 2.11 does by default: operations outside of autograd functions."""
    newer = wrap.tag_activation_checkpoint_impl

    def tagged(graph: fx.GraphModule, *args: Any, **settings: Any) -> Any:
        if "_checkpoint_context_fn" in graph.meta:
            return newer(graph, *args, **settings)
        region = next(wrap.uid)
        for node in graph.graph.nodes:
            if node.op.startswith("call_"):
                node.meta |= {"ac_graph_id": region, "recompute": CheckpointPolicy.PREFER_RECOMPUTE}
        with preserve_node_meta():
            return fx.Interpreter(graph).run(*args)

    monkeypatch.setattr(wrap, "tag_activation_checkpoint_impl", tagged)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))


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
