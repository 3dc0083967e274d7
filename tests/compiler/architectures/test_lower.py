"""Lowering: the programs of a spec, their one parameter table, shared functions, and errors told with their places."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ATTENTION, MLP, random_params, tiny

from specc.compiler import pipeline
from specc.compiler.ops.region import Call
from specc.compiler.programs import reference
from specc.compiler.programs.programs import LoweringError, Programs, flatten, scalar_values
from specc.compiler.spec.check import load

SPECS = Path(__file__).parents[3] / "specs"


def lowered(**words: Any) -> Programs:
    return pipeline.lower(tiny(**words), "cpu")


def of_spec(name: str, target: str = "cpu") -> Programs:
    return pipeline.lower(load(SPECS / f"{name}.yaml")[0], target)


def test_a_small_model_reads_exactly_so() -> None:
    programs = lowered(head={"softcap": 30}, layers=({**ATTENTION, "rope": {}, "kv_heads": 1}, MLP))
    assert (
        str(programs.program("train"))
        == """\
graph train(ids: i64[B,T], targets: i64[B,T]) {
  param embed.token : f32[11,8]
  embed.token = embedding(ids, @embed.token) : f32[B,T,8]
  positions = positions(ids) : i64[T]
  rope4_10000_backward = rope_angles(positions){dims=4, base=10000.0} : f32[T,2], f32[T,2]
  blocks.0 = call(embed.token, rope4_10000_backward, rope4_10000_backward:1)\
{callee='block.forward', at='blocks.0', returns=((('B', 'T', 8), 'f32'),)} : f32[B,T,8]
  blocks.1 = call(blocks.0, rope4_10000_backward, rope4_10000_backward:1)\
{callee='block.forward', at='blocks.1', returns=((('B', 'T', 8), 'f32'),)} : f32[B,T,8]
  norm = rms_norm(blocks.1) : f32[B,T,8]
  head.logits = linear(norm, @embed.token) : f32[B,T,11]
  head.softcap = pointwise(head.logits){outputs=('30.0 * tanh(z / 30.0)',), variables=('z',), dtype='f32'} : f32[B,T,11]
  head.loss = cross_entropy(head.softcap, targets){reduction='mean'} : f32[]
  return loss=head.loss
}"""
    )
    assert (
        str(programs.function("block.extend"))
        == """\
graph block.extend(x: f32[B,T,8], cos: f32[T,2], sin: f32[T,2], positions: i64[T], \
attention_k: f32[B,S,1,4], attention_v: f32[B,S,1,4]) {
  param attention.q : f32[8,8]
  param attention.k : f32[4,8]
  param attention.v : f32[4,8]
  param attention.out : f32[8,8]
  param mlp.up : f32[12,8]
  param mlp.down : f32[8,12]
  attention.h = rms_norm(x) : f32[B,T,8]
  attention.q = linear(attention.h, @attention.q) : f32[B,T,8]
  attention.q.heads = split_heads(attention.q){heads=2} : f32[B,T,2,4]
  attention.k = linear(attention.h, @attention.k) : f32[B,T,4]
  attention.k.heads = split_heads(attention.k){heads=1} : f32[B,T,1,4]
  attention.v = linear(attention.h, @attention.v) : f32[B,T,4]
  attention.v.heads = split_heads(attention.v){heads=1} : f32[B,T,1,4]
  attention.q.rope = rope(attention.q.heads, cos, sin) : f32[B,T,2,4]
  attention.k.rope = rope(attention.k.heads, cos, sin) : f32[B,T,1,4]
  attention.k.cache = cache_write(attention_k, attention.k.rope, positions) : f32[B,S,1,4]
  attention.v.cache = cache_write(attention_v, attention.v.heads, positions) : f32[B,S,1,4]
  attention.y = sdpa_cached(attention.q.rope, attention.k.cache, attention.v.cache, positions) : f32[B,T,2,4]
  attention.y.merged = merge_heads(attention.y) : f32[B,T,8]
  attention.out = linear(attention.y.merged, @attention.out) : f32[B,T,8]
  attention.x = pointwise(x, attention.out){outputs=('x + branch',), variables=('x', 'branch')} : f32[B,T,8]
  mlp.h = rms_norm(attention.x) : f32[B,T,8]
  mlp.up = linear(mlp.h, @mlp.up) : f32[B,T,12]
  mlp.act = pointwise(mlp.up){outputs=('relu(x) ** 2',), variables=('x',)} : f32[B,T,12]
  mlp.down = linear(mlp.act, @mlp.down) : f32[B,T,8]
  mlp.x = pointwise(attention.x, mlp.down){outputs=('x + branch',), variables=('x', 'branch')} : f32[B,T,8]
  return x=mlp.x, attention_k=attention.k.cache, attention_v=attention.v.cache
}"""
    )


COUNTS = {
    "gpt_mini": 1_017_496,
    "gpt_mlp35": 29_951_068,
    "gpt_mlp35_base": 29_374_040,
    "gpt2_124m": 123_532_032,
    "poly_lstm": 3_725_472,
    "poly_attn": 405_215,
    "poly_transformer": 4_758_528,
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_specs_have_the_parameters_that_they_should(name: str) -> None:
    programs = of_spec(name)
    assert sum(param.count for param in programs.params) == COUNTS[name]
    assert len({param.name for param in programs.params}) == len(programs.params)


def test_the_parameters_of_the_golf_model() -> None:
    table = {param.name: param.shape for param in of_spec("gpt_mlp35_base").params}
    block = {
        "attention.q": (512, 512),
        "attention.k": (256, 512),
        "attention.v": (256, 512),
        "attention.q_gain": (8, 1),
        "attention.out": (512, 512),
        "attention.residual": (512,),
        "mlp.up": (1792, 512),
        "mlp.down": (512, 1792),
        "mlp.residual": (512,),
    }
    wanted = {"embed.token": (1024, 512)}
    wanted |= {f"blocks.{i}.{name}": shape for i in range(11) for name, shape in block.items()}
    wanted |= {f"blocks.{i}.skip.scale": (512,) for i in range(5, 10)}
    assert table == wanted


def test_all_programs_read_one_table() -> None:
    programs = of_spec("gpt_mini")
    names = {param.name for param in programs.params}
    for graph in programs.programs:
        flat = flatten(programs, graph)
        read = {ref[1:] for node in flat.nodes for ref in node.inputs if ref.startswith("@")}
        assert read == names, graph.name


def test_a_target_sets_the_dtype() -> None:
    assert {param.dtype for param in of_spec("gpt_mini", "sm90").params} == {"bf16"}
    assert {param.dtype for param in of_spec("gpt_mini", "cpu").params} == {"f32"}
    logits = of_spec("gpt_mini", "sm90").program("train").types["head.softcap"]
    assert logits.dtype == "f32"  # the loss is in f32 wherever the model runs


def test_equal_blocks_share_a_function_and_skipping_ones_have_another() -> None:
    train = of_spec("gpt_mlp35_base").program("train")
    calls = [node for node in train.nodes if isinstance(node.op, Call)]
    assert [node.op.callee for node in calls if isinstance(node.op, Call)] == [
        *["block.forward"] * 5,
        *["skip_block.forward"] * 5,
        "block.forward",
    ]
    skips = {node.name: node.inputs[-1] for node in calls if len(node.inputs) == 4}
    assert skips == {f"blocks.{5 + i}": f"blocks.{4 - i}" for i in range(5)}
    scales = [value for node in calls if isinstance(node.op, Call) for _, value in node.op.scalars]
    assert scales == [1 / math.sqrt(i + 1) for i in range(11)]


def test_state_is_an_input_and_an_output_of_the_programs_that_keep_it() -> None:
    programs = of_spec("gpt_mini")
    for name, tokens in (("prefill", "T"), ("decode", 1)):
        graph = programs.program(name)
        caches = {f"cache.{i}.attention.{part}" for i in range(6) for part in "kv"}
        assert {key for key, _ in graph.inputs} == {"ids", "start"} | caches
        assert {key for key, _ in graph.outputs} == {"logits"} | caches
        assert graph.types["ids"].shape == ("B", tokens)
        assert all(str(graph.types[key]) == "f32[B,S,2,32]" for key in caches)


def test_layers_that_turn_alike_share_angles_and_others_do_not() -> None:
    def angles(*ropes: dict[str, Any]) -> list[str]:
        layers = [{**ATTENTION, "name": f"a{i}", "rope": rope} for i, rope in enumerate(ropes)]
        graph = lowered(layers=layers).program("train")
        return [f"{node.name}{node.op.settings()}" for node in graph.nodes if node.op.name == "rope_angles"]

    assert angles({"base": 50.5}, {"base": 50.5, "dims": 4}) == ["rope4_50p5_backward{dims=4, base=50.5}"]
    assert angles({"base": 50}, {"base": 60}) == [
        "rope4_50_backward{dims=4, base=50.0}",
        "rope4_60_backward{dims=4, base=60.0}",
    ]
    assert angles({"base": 50}, {"base": 50, "dims": 2}) == [
        "rope4_50_backward{dims=4, base=50.0}",
        "rope2_50_backward{dims=2, base=50.0}",
    ]


def test_positions_are_only_where_they_are_read() -> None:
    programs = lowered()
    assert "positions" not in programs.program("train").by_name
    assert "positions" in programs.program("decode").by_name


def test_flattening_names_every_value_by_its_place() -> None:
    layers = (ATTENTION, {**MLP, "residual": "1/(layer + 1)"})
    programs = lowered(layers=layers, count=2)
    graph = flatten(programs, programs.program("train"))
    assert graph.by_name["blocks.1.mlp.x"].inputs == (
        "blocks.1.attention.x",
        "blocks.1.mlp.down",
        "$blocks.1.mlp_residual",
    )
    assert graph.by_name["blocks.1.attention.q"].inputs == ("blocks.1.attention.h", "@blocks.1.attention.q")
    assert graph.by_name["blocks.1.attention.x"].inputs[0] == "blocks.0.mlp.x"
    assert graph.scalars == ("blocks.0.mlp_residual", "blocks.1.mlp_residual")
    assert scalar_values(programs.program("train")) == {"blocks.0.mlp_residual": 1.0, "blocks.1.mlp_residual": 0.5}


def test_the_reference_keeps_numbers_in_float64() -> None:
    spec = tiny(blocks={"norm": {"kind": "rms", "scale": "1/(layer + 3)"}})
    programs = pipeline.lower(spec, "cpu")
    params = random_params(programs, 0)
    ids = torch.zeros(1, 3, dtype=torch.int64)
    loss = reference.run(programs, "train", {"ids": ids, "targets": ids}, params)["loss"]
    assert loss.dtype == torch.float64
    fixed = {
        name: value / 3 if name.startswith("blocks.0.") and name.endswith((".q", ".k", ".v", ".up")) else value
        for name, value in params.items()
    }
    fixed = {
        name: value / 4 if name.startswith("blocks.1.") and name.endswith((".q", ".k", ".v", ".up")) else value
        for name, value in fixed.items()
    }
    plain = pipeline.lower(tiny(), "cpu")
    same = reference.run(plain, "train", {"ids": ids, "targets": ids}, fixed)["loss"]
    torch.testing.assert_close(loss, same, rtol=1e-14, atol=1e-14)


def test_places_lead_back_to_the_spec() -> None:
    programs = lowered(layers=(ATTENTION, {**MLP, "name": "wide"}))
    assert programs.place("blocks.1.wide.up") == ("model", "blocks", "layers", 1)
    assert programs.place("embed.token") == ("model", "embed", 0)
    assert programs.place("head.logits") == ("model", "head")
    assert programs.place("elsewhere") == ("model",)


ERRORS: list[tuple[dict[str, Any], tuple[Any, ...], str, tuple[Any, ...]]] = [
    (
        {"embed": [{"kind": "token", "dim": 4}]},
        ("model", "blocks", "layers", 0),
        "blocks.0.attention.q takes 8 features but embed.token gives 4",
        ("model", "embed", 0),
    ),
    (
        {"embed": [{"kind": "token", "dim": 4}, {"kind": "norm"}], "layers": (MLP,)},
        ("model", "blocks", "layers", 0),
        "blocks.0.mlp.up takes 8 features but embed.token gives 4",
        ("model", "embed", 0),
    ),
    (
        {"embed": [{"kind": "token", "dim": 4}, {"kind": "project"}]},
        ("model", "head"),
        "head.logits takes 4 features but blocks.1 gives 8",
        ("model", "embed", 0),
    ),
]


@pytest.mark.parametrize(("words", "path", "message", "related"), ERRORS, ids=[message for _, _, message, _ in ERRORS])
def test_a_shape_error_names_both_nodes_and_both_places(
    words: dict[str, Any], path: tuple[Any, ...], message: str, related: tuple[Any, ...]
) -> None:
    with pytest.raises(LoweringError) as caught:
        lowered(**words)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path, problem.message) == ("S301", path, message)
    assert [place for _, place in problem.related] == [related]
