"""Dependencies that keep the order of recomputed regions in a compiled backward pass."""

from pathlib import Path

import pytest
import torch
from partitioned import partition, small_gpt
from run_samples import gpt_mini
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from specc.runtime.model.load import initialize, instantiate
from specc.runtime.train.recompute_order import RecomputeOrder, in_order


def recomputed(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """The nodes of each recomputed region, in the order of the graph."""
    regions: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op != "placeholder" and "recompute" in node.meta and node.meta.get("ac_graph_id") is not None:
            regions.setdefault(node.meta["ac_graph_id"], []).append(node)
    return regions


def ancestors(node: fx.Node) -> set[fx.Node]:
    found, waiting = set(), [node]
    while waiting:
        sources = set(waiting.pop().all_input_nodes) - found
        found |= sources
        waiting += sources
    return found


def waits_for(graph: fx.Graph) -> list[set[int]]:
    """For each region, from the last block to the first, the other regions on which all its nodes depend that read
    saved values."""
    regions = recomputed(graph)
    of = {node: region for region, nodes in regions.items() for node in nodes}
    waits = []
    for region in sorted(regions, reverse=True):
        sources = [ancestors(node) for node in regions[region]]
        reading = [found for found in sources if any(s.op == "placeholder" and "primals" not in s.name for s in found)]
        waits.append(set.intersection(*({of[s] for s in found if s in of} for found in reading)) - {region})
    return waits


# Not the MLPs of gpt_mlp35: a later block reads the output of one, so its gradient needs that value early
@pytest.mark.parametrize(("name", "part"), [("gpt_mlp35", "[block]"), ("gpt2_124m", "[mlp]"), ("gpt2_124m", "[block]")])
def test_a_region_waits_for_the_gradients_of_later_regions(name: str, part: str, tmp_path: Path) -> None:
    forward, backward = partition(small_gpt(name, f"train.recompute={part}"), "sm90", tmp_path)
    last_to_first = sorted(recomputed(backward.graph), reverse=True)
    assert len(last_to_first) > 3 and waits_for(backward.graph) == [set()] * len(last_to_first)
    nodes = len(forward.graph.nodes)
    for graph in (forward.graph, backward.graph):
        RecomputeOrder()(graph)
        graph.lint()
    assert len(forward.graph.nodes) == nodes
    assert waits_for(backward.graph) == [set(last_to_first[:i]) for i in range(len(last_to_first))]
    memory = backward.graph.find_nodes(op="call_function", target=torch.ops.aten.empty.memory_format)
    assert memory == []  # which the scheduler would allocate before it is written


@pytest.mark.parametrize("part", ["[mlp]", "[block]"])
def test_the_gradients_do_not_change(part: str, tmp_path: Path) -> None:
    spec = gpt_mini(f"train.recompute={part}", "model.blocks.count=3", "model.context=32")
    loaded = instantiate(spec, "cpu", tmp_path)
    initialize(loaded, 0)
    ids = torch.randint(0, spec.model.vocab, (2, 32), generator=torch.Generator().manual_seed(1))
    gradients = []
    for function in (loaded.model, torch.compile(loaded.model, fullgraph=True, options=in_order())):
        loaded.model.zero_grad()
        function(ids, ids).sum().backward()
        gradients.append([param.grad for param in loaded.model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


def test_sizes_may_be_variables() -> None:
    """Torch 2.11 gives the saved states of generators variable sizes."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])  # type: ignore[var-annotated]
    x = mode.from_tensor(torch.zeros(5), symbolic_context=sizes)
    with mode:
        assert torch.ops.specc.after(x, x).shape == x.shape and not isinstance(x.shape[0], int)
        assert torch.ops.specc.empty_after([2, *x.shape], x, dtype=x.dtype).shape == (2, *x.shape)
