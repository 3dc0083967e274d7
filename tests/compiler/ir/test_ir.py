"""Graphs: the text form and back, the builder, what types and errors say."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import ATTENTION, MLP, tiny

from specc.compiler import ops, pipeline
from specc.compiler.catalog import classes
from specc.compiler.expr.python_lines import operand
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import Graph, Node, output_ref, rename, walk
from specc.compiler.ir.op import Op
from specc.compiler.ir.text import GraphTextError, parse, parse_type
from specc.compiler.ir.types import TensorType, TypeRuleError
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.norm import RmsNorm
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.positions import Positions, RopeAngles
from specc.compiler.ops.shape import MergeHeads, SplitHeads
from specc.compiler.programs.programs import flatten
from specc.compiler.spec.check import load

OPS = classes(ops, Op)
SPECS = sorted((Path(__file__).parents[3] / "specs").glob("*.yaml"))


def all_graphs(path: Path) -> Iterator[Graph]:
    """Every graph of a spec, on each target, before and after each pass."""
    spec, _ = load(path)
    for target in spec.targets:
        cut = spec.model.kind == "encoder_decoder"
        for name, form in pipeline.forms().items():
            if form == "uncached" and not cut:
                continue
            try:
                programs = pipeline.after(spec, target, name)
            except ValueError:  # an operation that exported programs cannot have, or no program that extends a text
                assert form == "exported" or (form in ("decoding", "packed") and cut)
                continue
            yield from programs.graphs
            yield from (flatten(programs, graph) for graph in programs.programs)
            for group in programs.groups:
                yield group.forward
                yield group.backward


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_graph_of_every_spec_reads_back(path: Path) -> None:
    count, read = 0, dict[str, Graph]()
    for graph in all_graphs(path):
        text = str(graph)
        if text not in read:  # most passes leave most graphs as they are
            read[text] = parse(text, OPS)
        assert read[text] == graph
        count += 1
    assert count > 30


def test_scalars_and_epilogues_read_back() -> None:
    layers = (ATTENTION, {**MLP, "act": "silu(gate) * x", "residual": "1/(layer + 1)"})
    programs = pipeline.run(tiny(layers, blocks={"norm": {"kind": "rms", "scale": "1/(layer + 2)"}}), "cpu")
    texts = [str(graph) for graph in (*programs.graphs, programs.groups[0].forward)]
    assert any(", $norm_scale" in text for text in texts)
    assert any(
        "{weights=2} |> pointwise{" in text and "title='silu_mul'} of (mlp.up, mlp.gate, mlp.act)" in text
        for text in texts
    )
    for graph in programs.graphs:
        assert parse(str(graph), OPS) == graph


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_read_back(seed: int) -> None:
    graph = random_graph(random.Random(seed))
    again = parse(str(graph), OPS)
    assert again == graph
    assert str(again) == str(graph)


def random_graph(rng: random.Random) -> Graph:
    """A few nodes over symbolic rows; names, settings and storage vary."""
    b = Builder(rng.choice(["train", "block.forward", "a_1.b"]))
    dtype = rng.choice(["f32", "bf16"])
    refs = [b.input(f"x{i}", TensorType(("B", "T", 8), dtype)) for i in range(rng.randint(1, 3))]
    for i in range(rng.randint(1, 8)):
        b.scope = rng.choice(["", "mlp", "blocks.0.attention"])
        ref = rng.choice(refs)
        kind = rng.randrange(5)
        if kind == 0:
            storage = rng.choice(["", "int5", "f16"])
            weight = b.param(f"w{i}", TensorType((8, 8), dtype, storage), None)
            refs.append(b.add(f"n{i}", Linear(), (ref, weight)))
        elif kind == 1:
            refs.append(b.add(f"n{i}", RmsNorm(rng.choice([1e-6, 0.5, 1e-30])), (ref,)))
        elif kind == 2:
            text = rng.choice(["x * scale", "where(x >= 0.25, x, -x) ** 2 * scale", "-1e-09 * x + scale"])
            scale = b.scalar(f"s{i % 2}", "1/2")
            refs.append(
                b.add(f"n{i}", Pointwise((text,), ("x", "scale"), title=rng.choice(["", "some"])), (ref, scale))
            )
        elif kind == 3:
            heads = b.add(f"n{i}.heads", SplitHeads(rng.choice([1, 2, 4])), (ref,))
            refs.append(b.add(f"n{i}", MergeHeads(), (heads,)))
        else:
            outputs = ("x + 1", "max(x, 0.5)")
            node = b.add(f"n{i}", Pointwise(outputs, ("x",), ("y", "most")), (ref,))
            refs += [node, output_ref(node, 1)]
    last = refs[-1]
    return b.build({"y": last, "cache.0.k": refs[0]})


@pytest.mark.parametrize("text", ["f32[]", "bf16[T,1792]", "int5:bf16[512,1792]", "i64[B,1]"])
def test_types_read_back(text: str) -> None:
    assert str(parse_type(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("graph g() {\n  nonsense\n}", "line 2: '  nonsense' is not a line of a graph"),
        ("graph g(x: f32[2]) {\n  y = nothing(x) : f32[2]\n}", "line 2: 'nothing' is not an op"),
        ("graph g(x: f32) {\n}", "line 1: 'f32' is not a type"),
    ],
)
def test_bad_graph_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(GraphTextError) as caught:
        parse(text, OPS)
    assert str(caught.value) == message


def test_sizes_and_bytes_of_a_type() -> None:
    type = TensorType(("B", "T", 6), "bf16")
    assert type.count({"B": 2, "T": 5}) == 60
    assert type.bytes({"B": 2, "T": 5}) == 120
    assert type.width == 6
    assert str(type.with_shape("B", 3)) == "bf16[B,3]"


def test_the_builder_refuses_two_nodes_of_one_name() -> None:
    b = Builder("g")
    x = b.input("x", TensorType(("B", 4), "f32"))
    b.add("n", RmsNorm(), (x,))
    with pytest.raises(TypeRuleError, match="two nodes are named n"):
        b.add("n", RmsNorm(), (x,))


def test_one_parameter_has_one_type() -> None:
    b = Builder("g", scope="mlp")
    first = b.param("w", TensorType((4, 4), "f32"), "a start")
    assert first == b.param("w", TensorType((4, 4), "f32"), "another") == "@mlp.w"
    assert b.inits == {"mlp.w": "a start"}
    with pytest.raises(TypeRuleError, match=r"parameter mlp\.w is both f32\[4,4\] and f32\[4,5\]"):
        b.param("w", TensorType((4, 5), "f32"), None)


def test_a_width_error_names_the_node_that_made_the_width() -> None:
    b = Builder("g", scope="decoder")
    x = b.input("x", TensorType(("B", 8), "f32"))
    wide = b.add("embed", Linear(), (x, b.param("e", TensorType((64, 8), "f32"), None)))
    normed = b.add("norm", RmsNorm(), (b.add("double", Pointwise(("2 * x",), ("x",)), (wide,)),))
    with pytest.raises(TypeRuleError) as caught:
        b.add("proj", Linear(), (normed, b.param("p", TensorType((8, 128), "f32"), None)))
    assert caught.value.message == "decoder.proj takes 128 features but decoder.embed gives 64"


def test_uses_count_readers_and_returns() -> None:
    b = Builder("g")
    x = b.input("x", TensorType(("T",), "i64"))
    angles = b.add(
        "r", RopeAngles(4, 10.0), (b.add("p", Positions(), (b.input("ids", TensorType(("B", "T"), "i64")),)),)
    )
    both = b.add("s", Pointwise(("a * b",), ("a", "b")), (angles, angles))
    graph = b.build({"s": both, "sin": f"{angles}:1", "again": both})
    assert [graph.uses(ref) for ref in (x, "p", "r", "r:1", "s")] == [0, 1, 2, 1, 2]
    assert [node.name for node in graph.consumers["r"]] == ["s", "s"]
    assert str(graph.types["r:1"]) == "f32[T,2]"
    swapped = rename(graph, {"r": "r:1"})
    assert [swapped.uses(ref) for ref in ("r", "r:1")] == [0, 3]


def test_walk_visits_each_called_function_once() -> None:
    programs = pipeline.run(tiny(count=3, blocks={"skips": {"kind": "unet"}}), "cpu", "lower")
    graphs = {graph.name: graph for graph in programs.graphs}
    results = [graph.name for graph in walk(graphs, programs.program("train"))]
    assert results == ["train", "block.forward", "skip_block.forward"]


def test_settings_leave_out_defaults() -> None:
    assert RmsNorm().settings() == ""
    assert RmsNorm(eps=0.5).settings() == "{eps=0.5}"
    assert (
        str(Node("n", SplitHeads(2), ("x",), (TensorType((2, 3), "f32"),))) == "n = split_heads(x){heads=2} : f32[2,3]"
    )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x", "x"),
        ("f(x + 1)", "f(x + 1)"),
        ("x.y[0]", "x.y[0]"),
        ("a + b", "(a + b)"),
        ("-a", "(-a)"),
        ("a, b", "(a, b)"),
    ],
)
def test_operand_adds_parentheses_only_where_they_are_needed(text: str, wanted: str) -> None:
    assert operand(text) == wanted


def test_an_op_that_says_nothing_fails_loudly() -> None:
    class Silent(Op):
        name = "silent"

    op = Silent()
    for ask in (lambda: op.arity, lambda: op.infer([]), lambda: op.torch([], []), lambda: op.reference()):
        with pytest.raises(TypeRuleError, match="silent has no"):
            ask()
    assert Op.derivative(op, None) is None  # type: ignore[arg-type]
