"""Generated Python: what is written on a line, what a value is called, and that it computes the graph."""

import ast
import math
import random
import re
from difflib import unified_diff
from pathlib import Path

import pytest
import torch
from run_samples import SPEC, small_spec
from tiny_models import ATTENTION, MLP, float64, pair, spec_data, spec_of, tiny

from specc.compiler import pipeline
from specc.compiler.build import compile_loaded
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import Graph, output_ref
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.norm import RmsNorm
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.region import Call
from specc.compiler.ops.shape import MergeHeads, SplitHeads
from specc.compiler.passes.merge import merge
from specc.compiler.programs import reference
from specc.compiler.render.body import THOUGHT, Body
from specc.compiler.render.conditions import Fact, Indistinguishable
from specc.compiler.render.formula import python_formula

X = TensorType(("B", "T", 8), "f64")


def spelled(graph: Graph, reserved: frozenset[str] = frozenset()) -> list[str]:
    """The body of the function that the graph becomes."""
    body = Body(merge([graph]), lambda _, node, args: None, reserved=reserved)
    return [*body.lines, f"return {body.returned()}"]


def double(name: str = "x") -> Pointwise:
    return Pointwise((f"2 * {name}",), (name,))


def test_a_value_read_once_stands_in_its_readers_line() -> None:
    b = Builder("g")
    x = b.input("x", X)
    h = b.add("mlp.h", RmsNorm(), (x,))
    up = b.add("mlp.up", Linear(), (h, b.param("w", TensorType((8, 8), "f64"), None)))
    assert spelled(b.build({"y": b.add("mlp.act", double(), (up,))})) == [
        "return 2.0 * F.linear(F.rms_norm(x, (8,), eps=1e-06), self.w)"
    ]


def test_a_value_read_twice_has_a_name() -> None:
    b = Builder("g")
    x = b.input("x", X)
    h = b.add("mlp.h", RmsNorm(), (x,))
    assert spelled(b.build({"y": b.add("mlp.sum", Pointwise(("a + b",), ("a", "b")), (h, h))})) == [
        "h = F.rms_norm(x, (8,), eps=1e-06)",
        "return h + h",
    ]


def test_a_value_that_its_readers_text_repeats_has_a_name() -> None:
    """x * sigmoid(x) reads its one input twice; max(x, 1) only looks like it does."""
    b = Builder("g")
    x = b.input("v", X)
    h = b.add("mlp.h", RmsNorm(), (x,))
    assert spelled(b.build({"y": b.add("mlp.act", Pointwise(("x * sigmoid(x)",), ("x",)), (h,))}))[0].startswith("h = ")
    b = Builder("g")
    h = b.add("mlp.h", RmsNorm(), (b.input("v", X),))
    assert spelled(b.build({"y": b.add("mlp.act", Pointwise(("exp(x)",), ("x",)), (h,))})) == [
        "return torch.exp(F.rms_norm(v, (8,), eps=1e-06))"
    ]


def test_names_are_short_until_they_meet() -> None:
    b = Builder("g")
    x = b.input("x", X)
    first = b.add("attention.h", RmsNorm(), (x,))
    two = b.add("mlp.h", RmsNorm(0.5), (x,))
    mixed = b.add("mlp.m", Pointwise(("a * b + a + b",), ("a", "b")), (first, two))
    assert spelled(b.build({"y": mixed})) == [
        "h = F.rms_norm(x, (8,), eps=1e-06)",
        "mlp_h = F.rms_norm(x, (8,), eps=0.5)",
        "return h * mlp_h + h + mlp_h",
    ]


def test_a_name_is_free_again_when_its_value_is_dead() -> None:
    b = Builder("g")
    x = b.input("x", X)
    for part in ("attention", "mlp"):
        h = b.add(f"{part}.h", RmsNorm(), (x,))
        x = b.add(f"{part}.x", Pointwise(("a * a + x",), ("a", "x")), (h, x))
    assert [line.partition(" = ")[0] for line in spelled(b.build({"x": x}))[:-1]] == ["h", "x", "h"]


def test_reserved_names_are_not_taken() -> None:
    b = Builder("g")
    h = b.add("mlp.h", RmsNorm(), (b.input("x", X),))
    graph = b.build({"y": b.add("mlp.s", Pointwise(("a * a",), ("a",)), (h,))})
    assert spelled(graph, frozenset({"h"}))[0].startswith("mlp_h = ")


def test_several_outputs_are_named_by_their_labels() -> None:
    b = Builder("g")
    both = b.add("mlp.act", Pointwise(("x + 1", "x - 1"), ("x",), ("more", "less")), (b.input("x", X),))
    y = b.add("mlp.y", Pointwise(("a * b",), ("a", "b")), (both, output_ref(both, 1)))
    assert spelled(b.build({"y": y})) == ["more, less = x + 1.0, x - 1.0", "return more * less"]


def test_a_line_is_one_thought_whatever_its_length() -> None:
    """Not more nodes than a thought has, however short their text; and what is one thought stays one, however long."""
    b = Builder("g", scope="attention")
    value = b.input("x", X)
    for i in range(8):
        value = b.add(f"n{i}", RmsNorm(), (b.add(f"d{i}", double(), (value,)),))
    lines = spelled(b.build({"y": value}))
    assert len(lines) == 4
    assert all(line.count("rms_norm") + line.count("2.0") <= THOUGHT for line in lines)
    b = Builder("g")
    x = b.input("an_input_with_a_very_long_name_" * 4, X)
    assert len(spelled(b.build({"y": b.add("n", RmsNorm(), (b.add("d", double(), (x,)),))}))) == 1


def test_two_products_are_two_lines() -> None:
    b = Builder("g")
    up = b.add("mlp.up", Linear(), (b.input("x", X), b.param("w", TensorType((8, 8), "f64"), None)))
    act = b.add("mlp.act", double(), (up,))
    down = b.add("mlp.down", Linear(), (act, b.param("v", TensorType((8, 8), "f64"), None)))
    assert spelled(b.build({"y": down})) == ["act = 2.0 * F.linear(x, self.w)", "return F.linear(act, self.v)"]


@pytest.mark.parametrize("seed", range(60))
def test_random_bodies_compute_their_graphs(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng)
    lines = spelled(graph, frozenset({"h"} if seed % 3 == 0 else ()))
    names = [name for name, _ in graph.inputs]
    space: dict[str, object] = {"torch": torch, "F": torch.nn.functional}
    weight = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    text = "\n".join([f"def f(self, {', '.join(names)}):", *(f"    {line}" for line in lines)])
    exec(text, space)
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(2, 3, 8, dtype=torch.float64, generator=generator) for name in names}
    holder = type("Holder", (), {"w": weight})()
    result = space["f"](holder, **values)  # type: ignore[operator]
    result = result if isinstance(result, tuple) else (result,)
    held = {**values, "@w": weight}
    for node in graph.nodes:
        held |= zip(node.outputs, reference.node_value(node, [held[ref] for ref in node.inputs]), strict=True)
    for have, (_, ref) in zip(result, graph.outputs, strict=True):
        torch.testing.assert_close(have, held[ref], rtol=1e-12, atol=1e-12)
    assert_nothing_is_computed_twice(text, graph)


def random_graph(rng: random.Random) -> Graph:
    b = Builder("g")
    refs = [b.input(name, X) for name in ("x", "h", "value")[: rng.randint(1, 3)]]
    weight = b.param("w", TensorType((8, 8), "f64"), None)
    for i in range(rng.randint(2, 14)):
        b.scope = rng.choice(["mlp", "attention", "skip"])
        name = f"{rng.choice('hxyv')}{rng.choice(['', i])}"
        if b.path(name) in b.types:
            name += f"_{i}"
        ref, other = rng.choice(refs), rng.choice(refs)
        kind = rng.randrange(5)
        if kind == 0:
            refs.append(b.add(name, Linear(), (ref, weight)))
        elif kind == 1:
            refs.append(b.add(name, RmsNorm(), (ref,)))
        elif kind == 2:
            text = rng.choice(["a * b", "a + tanh(b) * a", "where(a > b, a, 2 * b)", "-a - -b", "max(a, b) / 3"])
            refs.append(b.add(name, Pointwise((text,), ("a", "b")), (ref, other)))
        elif kind == 3:
            refs.append(b.add(name, MergeHeads(), (b.add(f"{name}.heads", SplitHeads(2), (ref,)),)))
        else:
            node = b.add(name, Pointwise(("a + 1", "a * a"), ("a",), ("most", "square")), (ref,))
            refs += [node, output_ref(node, 1)]
    chosen = rng.sample(refs, min(len(refs), rng.randint(1, 3)))
    return b.build({f"y{i}": ref for i, ref in enumerate(chosen)})


def assert_nothing_is_computed_twice(text: str, graph: Graph) -> None:
    """As many calls of the library as the graph has nodes that are such calls."""
    functions = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    calls = [function.attr for function in functions if isinstance(function, ast.Attribute)]
    for function, op in (("linear", Linear), ("rms_norm", RmsNorm)):
        assert calls.count(function) == sum(isinstance(node.op, op) for node in graph.nodes)


@pytest.mark.parametrize("seed", range(60))
def test_random_conditions_hold_in_their_variants(seed: int) -> None:
    """A condition is true in its variants and false in all others. There is none if the facts of two variants that it
    must tell apart are equal."""
    draw = random.Random(seed)
    b = Builder("g")
    graph = b.build({"y": b.add("y", double(), (b.input("x", X),))})
    every = frozenset(range(draw.randint(2, 6)))
    names = [f"fact{i}" for i in range(draw.randint(1, 5))]
    facts = [Fact(name, frozenset(v for v in every if draw.random() < 0.5), draw.random() < 0.5) for name in names]
    body = Body(merge([graph] * len(every)), lambda _, node, args: None, facts=facts)
    values = [
        {fact.name: (1 if v in fact.where else None) if fact.optional else v in fact.where for fact in facts}
        for v in sorted(every)
    ]
    for _ in range(40):
        reached = frozenset(draw.sample(sorted(every), draw.randint(2, len(every))))
        where = frozenset(draw.sample(sorted(reached), draw.randint(1, len(reached) - 1)))
        if any(values[v] == values[other] for v in where for other in reached - where):
            with pytest.raises(Indistinguishable, match="of g"):
                body.condition(where, reached)
            continue
        body.conditions.clear()
        text = body.condition(where, reached)
        assert {v for v in reached if eval(text, {}, values[v])} == where, text
        assert body.conditions == {name for name in names if name in text}


def test_the_model_file_of_a_small_spec() -> None:
    """One class of blocks; formulas stand as the spec has them; what only some blocks have is an optional argument."""
    equal = compile_loaded(tiny(count=3), None).files["cpu/model.py"]
    assert "self.blocks = nn.ModuleList(Block() for _ in range(3))" in equal
    by_layer = {"norm": {"kind": "rms", "scale": "1/(layer + 1)"}}
    scaled = compile_loaded(tiny(blocks=by_layer), None).files["cpu/model.py"]
    assert "self.norm_scale = 1 / (layer + 1)" in scaled and "Block(layer) for layer in range(2)" in scaled
    without = {"norm": {"kind": "rms", "scale": "sigmoid(layer)"}}  # which Python's math does not have
    assert "NORM_SCALES = (0.5, 0.731" in compile_loaded(tiny(blocks=without), None).files["cpu/model.py"]
    named = {"layers": (ATTENTION, {**MLP, "residual": "1/sqrt(2 * layers)"})}
    assert "\nMLP_RESIDUAL = 1 / math.sqrt(2 * 2)\n" in compile_loaded(tiny(**named), None).files["cpu/model.py"]
    skips = compile_loaded(tiny(blocks={"skips": {"kind": "unet"}}), None).files["cpu/model.py"]
    assert skips.count("(nn.Module):") == 2  # Block and Model
    assert "SKIPS = {1: 0}  # block -> the earlier block whose output it also reads\n" in skips
    assert "if skip is not None:\n            x = x + self.skip.scale * skip\n" in skips


def test_formulas_are_the_numbers_that_the_plan_has() -> None:
    formula = "1/sqrt(layer + 1) + max(0.25, layer ** 2 / 7)"
    spec = tiny(count=4, blocks={"norm": {"kind": "rms", "scale": formula}})
    text = python_formula(formula)
    for call in pipeline.run(spec, "cpu").program("train").nodes:
        if isinstance(call.op, Call):
            (value,) = dict(call.op.scalars).values()
            assert eval(text, {"math": math}, {"layer": int(call.op.at.rpartition(".")[2])}) == value


def test_moving_value_embeddings_changes_few_lines() -> None:
    at = {"layers": [2, 3]}, {"layers": [1, 2]}
    first, second = (
        compile_loaded(tiny(({**ATTENTION, "values": {"dim": 4, **where}}, MLP), count=4), None).files["cpu/model.py"]
        for where in at
    )
    lines = list(unified_diff(first.splitlines(), second.splitlines(), n=0))[2:]
    changed = [line for line in lines if line[0] in "+-"]
    assert 2 <= len(changed) <= 12


def test_blocks_that_read_different_rotary_tables_are_one_function() -> None:
    """The loop passes each block its table; a block that reads none is given None."""
    layers = ({**ATTENTION, "rope": {"base": 100}}, MLP)
    changes = [
        {"where": "layer % 2 == 1", "attention": {"rope": {"base": 1000}}},
        {"where": "layer == 4", "attention": {"rope": {"dims": 2}}},
    ]
    code = compile_loaded(tiny(layers, fuse=(), count=5, blocks={"changes": changes}), None, ("cpu",)).files
    text = re.sub(r"\s+", " ", code["cpu/model.py"].replace("_BACKWARD", "").replace("_backward", ""))
    assert "def forward(self, x, cos, sin, positions=None, cache=None)" in text
    assert "ROPE4_1000 = {1, 3} # blocks with `rope4_1000` " in text and "ROPE2_100 = {4}" in text
    assert "rope2_100_cos if i in ROPE2_100 else rope4_1000_cos if i in ROPE4_1000 else cos" in text


def test_comments_say_which_blocks_a_set_has() -> None:
    """All blocks but the last have a cache and a `q`; two caches are short, and one `up` is wide."""
    changes = [
        {"where": "layer % 2 == 1", "attention": {"mask": "j <= i and i - j < 3"}},
        {"where": "layer == 2", "mlp": {"hidden": 24}},
        {"where": "layer == 4", "attention": None},
    ]
    spec = tiny((ATTENTION, MLP), fuse=(), count=5, blocks={"changes": changes})
    text = compile_loaded(spec, None, ("cpu",)).files["cpu/model.py"]
    assert dict(re.findall(r"^(\w+ = \{[\d, ]+\})  # (blocks .*)$", text, re.MULTILINE)) == {
        "Q = {0, 1, 2, 3}": "blocks with `q`",
        "K_CACHE = {0, 2}": "blocks with `k_cache`",
        "UP = {0, 1, 3, 4}": "blocks whose `up` differs",
        "UP_0 = {2}": "blocks whose `up` has the shape (MLP_E, D)",
        "CACHE = {1, 3}": "blocks whose cache has the shape (rows, 3, H, C)",
        "NO_CACHE = {4}": "blocks without a cache",
    }


def test_a_window_changes_no_line_of_the_mlp() -> None:
    first, second = (
        compile_loaded(tiny(({**ATTENTION, **more}, MLP)), None).files["cpu/model.py"] for more in ({}, {"window": 3})
    )
    lines = [[line for line in text.splitlines() if "mlp" in line or "act" in line] for text in (first, second)]
    assert lines[0] == lines[1] and len(lines[0]) > 5


def test_blocks_that_differ_in_an_epilogue() -> None:
    """The product of the deployed model adds the output of the MLP to the stream."""
    spec = small_spec(
        "targets=[sm90]",
        "model.blocks.changes=[{where: layer == 1, mlp: {write: x + 0.5 * y}}]",
        "model.blocks.layers.1.write=x + y",
        "model.blocks.layers.1.learn={}",
        'quant.rules=[{match: "*.{up,down}", scheme: int8}, {match: "*.{residual,q_gain}", scheme: none, dtype: f16}]',
    )
    text = compile_loaded(spec, None).files["sm90/deployed/model.py"]
    assert "self.down = layer in DOWN\n" in text and "        if self.down:\n            x = int8_linear_add" in text


def test_blocks_that_differ_only_in_the_values_that_nodes_read(tmp_path: Path) -> None:
    """Block 1 reads the streams of block 0 with their names swapped."""
    data = spec_data(fuse=())
    data["model"]["blocks"] = {
        "count": 4,
        "layers": [{**ATTENTION, "read": "a"}, {**MLP, "read": "b"}],
        "write": {"a": "a + attention", "b": "b + mlp"},
        "changes": [
            {"where": "layer == 0", "read": {"a": "x", "b": "2 * x"}},
            {"where": "layer == 1", "read": {"a": "b", "b": "a"}},
            {"where": "layer == layers - 1", "write": "a + attention + b + mlp"},
        ],
    }
    with float64():
        models = pair(spec_of(data), tmp_path)
        ids, targets = models.batch()
        want = models.reference("train", ids=ids, targets=targets)["loss"]
        torch.testing.assert_close(models.model(ids, targets), want)


def test_a_program_that_is_another_by_text_is_an_alias() -> None:
    text = compile_loaded(tiny(), None).files["cpu/model.py"]
    assert text.endswith("    decode = prefill  # the same code, a token at a time\n")
    assert text.count("def prefill(") == 1


def test_a_parameter_is_where_its_name_says() -> None:
    layers = (ATTENTION, {**MLP, "residual": "learned"})
    programs = pipeline.run(tiny(layers), "cpu")
    text = compile_loaded(tiny(layers), None).files["cpu/model.py"]
    assert "self.mlp = weights(up=(E, D), down=(D, E), residual=(D,))" in text
    assert [p.name for p in programs.params if p.name.startswith("blocks.0.mlp")] == [
        f"blocks.0.mlp.{name}" for name in ("up", "down", "residual")
    ]


WITHOUT_WORK = {"type_as", "to", "float", "contiguous", "flatten", "detach"}  # which may return their input


def results_without_work(text: str) -> list[str]:
    """The results of forward methods of autograd functions that may be the value of another name."""
    functions = [
        node
        for cls in ast.walk(ast.parse(text))
        if isinstance(cls, ast.ClassDef) and "autograd.Function" in ast.unparse(cls)
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and node.name == "forward"
    ]
    calls = []
    for function in functions:
        assigned = {ast.unparse(n.targets[0]): n.value for n in ast.walk(function) if isinstance(n, ast.Assign)}
        for returned in (node.value for node in ast.walk(function) if isinstance(node, ast.Return)):
            for value in returned.elts if isinstance(returned, ast.Tuple) else (returned,):
                call = assigned.get(ast.unparse(value), value)
                method = call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""
                if method in WITHOUT_WORK and "copy=True" not in ast.unparse(call):
                    calls.append(ast.unparse(call))
    return calls


def test_results_of_autograd_functions_are_new_values() -> None:
    """For others, the compiler of Torch 2.11 gives the inputs gradients of zero."""
    root = SPEC.parents[1]
    texts = [path.read_text() for path in root.glob("generated/**/*.py")]
    texts += [text for path in root.glob("templates/torch/**/*.jinja") if "{%" not in (text := path.read_text())]
    python = [text for text in texts if "{{" not in text and "autograd.Function" in text]
    assert len(python) > 20 and [call for text in python for call in results_without_work(text)] == []
    assert results_without_work(
        "class F(torch.autograd.Function):\n def forward(ctx, x):\n  y = x.float()\n  return y, 1"
    )
