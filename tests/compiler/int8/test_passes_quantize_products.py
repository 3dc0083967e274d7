"""Products in whole numbers: what joins an epilogue, what is shared, what a spec may not ask for."""

import pytest
from tiny_models import ATTENTION, MLP, spec_data, spec_of

from specc.compiler import pipeline
from specc.compiler.build import compile_loaded
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.quantized import Int8Linear, QuantizeRows
from specc.compiler.ops.shape import RowByRow
from specc.compiler.programs.programs import LoweringError, Programs
from specc.compiler.strict import Problem


def deployed(*rules: object) -> Programs:
    data = spec_data((ATTENTION, {**MLP, "hidden": 16}), fuse=())
    data["quant"] = {"default": {"scheme": "int8"}, "rules": [{"match": "embed.token", **NONE}, *rules]}
    programs = pipeline.deployed(spec_of(data), "cpu")
    assert programs is not None
    return programs


NONE = {"scheme": "none", "dtype": "f32"}


def test_the_programs_of_a_deployed_model_do_not_train() -> None:
    programs = deployed()
    assert [graph.name for graph in programs.programs] == ["score", "prefill", "decode"]
    assert programs.whole == ("score",)


def test_what_follows_joins_and_what_is_read_by_a_product_is_written_as_codes() -> None:
    block = deployed().function("block.forward")
    up, down = block.by_name["mlp.up"], block.by_name["mlp.down.padded"]
    assert up.members == ("mlp.up", "mlp.act", "mlp.down_input")
    assert up.epilogue is not None and up.epilogue.settings().startswith(
        "{outputs=('(relu(p * scale) ** 2) * inverse',)"
    )
    assert [str(type) for type in up.types] == ["i8[B,T,16]"] and "mlp.down_input" not in block.by_name
    assert down.inputs[0] == "mlp.up" and str(block.types["@mlp.down_codes"]) == "int8:i8[16,16]"


def test_products_of_one_input_share_its_codes() -> None:
    programs = deployed()
    block = programs.function("block.forward")
    roundings = [node for node in block.nodes if isinstance(node.op, QuantizeRows)]
    assert [node.name for node in roundings] == ["attention.q_input", "attention.out_input", "mlp.up_input"]
    readers = [node.name for node in block.consumers["attention.q_input"]]
    assert [name.removesuffix(".padded") for name in readers] == ["attention.q", "attention.k", "attention.v"]
    names = [param.name for param in programs.params]
    assert "blocks.1.attention.q_inverse" in names and "blocks.1.attention.k_inverse" not in names
    assert not any(param.storage == "int8" and param.dtype not in ("i8", "i32", "f32") for param in programs.params)


def test_every_product_is_padded_to_whole_loads() -> None:
    programs = deployed()
    for graph in programs.graphs:
        for node in graph.nodes:
            if isinstance(node.op, Int8Linear):
                n, k = node.op.extent(graph.types[node.inputs[1]])
                assert n % 16 == 0 and k % 16 == 0


def test_the_plan_shows_the_padding() -> None:
    data = spec_data((ATTENTION, MLP), fuse=())
    data["quant"] = {"default": {"scheme": "int8"}, "rules": [{"match": "embed.token", **NONE}]}
    page = compile_loaded(spec_of(data), None).files["PLAN.md"]
    assert "## cpu, deployed" in page and "- blocks.*.attention.q: N 8 is padded to 16" in page
    assert "- blocks.*.mlp.up: K 8 is padded to 16" in page


def test_blocks_that_share_code_share_the_choice() -> None:
    with pytest.raises(LoweringError) as raised:
        deployed({"match": "blocks.0.mlp.up", **NONE})
    messages = {problem.message for problem in raised.value.problems}
    assert messages == {"blocks.0.mlp.up is int8 in only some of the blocks that run the same code"}


def problem_of(*rules: object, default: object = NONE) -> Problem:
    data = spec_data((ATTENTION, {**MLP, "hidden": 16}), fuse=())
    data["quant"] = {"default": default, "rules": list(rules)}
    with pytest.raises(LoweringError) as raised:
        pipeline.deployed(spec_of(data), "cpu")
    (problem,) = raised.value.problems
    return problem


def test_what_is_to_be_kept_is_said_so_that_it_can_be_done() -> None:
    """Beside a rule that names a parameter no other rule helps."""
    by_rule = problem_of({"match": "*", "scheme": "int8"})
    assert by_rule.path == ("quant", "rules", 0) and by_rule.hint.startswith("narrow {match")
    keep = {"match": "embed.token", **NONE}
    some = problem_of(keep, {"match": "blocks.0.mlp.up", **NONE}, default={"scheme": "int8"})
    assert some.path == ("quant", "rules", 1) and '{match: "blocks.*.mlp.up", ...}' in some.hint
    by_default = problem_of(default={"scheme": "int8"})
    assert by_default.path == ("quant", "default") and by_default.hint.startswith("add a rule")
    assert by_default.code == "S312" and "embed.token is int8, but embedding reads it" in by_default.message
    assert 'match: "*.token"' in by_default.hint


def test_weights_that_share_an_input_scale_it_alike() -> None:
    """Those of other blocks have an input of their own."""
    by_feature = {"scheme": "int8", "activations": "per_channel"}
    keep = {"match": "embed.token", **NONE}
    problem = problem_of(keep, {"match": "blocks.*.attention.v", **by_feature}, default={"scheme": "int8"})
    wanted = "blocks.0.attention.q and other weights read the same input, but not all of them use one scale per feature"
    assert (problem.code, problem.path, problem.message) == ("S312", ("quant", "rules", 1), wanted)
    assert '{match: "blocks.*.attention.{q,k,v}", ...}' in problem.hint
    assert deployed({"match": "blocks.0.attention.{q,k,v}", **by_feature}).programs


def test_a_weight_that_is_kept_stays_a_product_of_floats() -> None:
    block = deployed({"match": "blocks.*.mlp.down", **NONE}).function("block.forward")
    assert not isinstance(block.by_name["mlp.down"].op, Int8Linear)
    assert block.by_name["mlp.up"].types[0].dtype == "f32"


def rewritten(layers: tuple[object, ...], *patterns: str) -> Programs:
    """A model of 16 features with int8 of `patterns` alone."""
    data = spec_data(layers, fuse=(), dim=16)  # type: ignore[arg-type]
    data["quant"] = {"default": NONE, "rules": [{"match": match, "scheme": "int8"} for match in patterns]}
    programs = pipeline.deployed(spec_of(data), "cpu")
    assert programs is not None
    return programs


def test_what_reads_two_products_joins_one_of_them() -> None:
    """The first, which reads the other."""
    gated = {**MLP, "hidden": 32, "act": "silu(gate) * x"}
    block = rewritten((ATTENTION, gated), "*.mlp.{up,gate}").function("block.forward")
    up, gate = block.by_name["mlp.up"], block.by_name["mlp.gate"]
    assert up.members == ("mlp.up", "mlp.act") and up.inputs[4:] == ("mlp.gate",)
    assert gate.members == ("mlp.gate",) and gate.epilogue is not None and gate.epilogue.outputs == ("p * scale",)  # type: ignore[attr-defined]
    assert "mlp.act" not in block.by_name


def epilogues(programs: Programs) -> dict[str, set[str]]:
    """The expressions of int8 products by the title that they have."""
    results: dict[str, set[str]] = {}
    for node in [node for graph in programs.graphs for node in graph.nodes if isinstance(node.op, Int8Linear)]:
        assert isinstance(node.epilogue, Pointwise)
        results.setdefault(node.epilogue.title, set()).update(node.epilogue.outputs)
    return results


def test_float_biases_of_one_role_have_one_kernel() -> None:
    """And what they join otherwise, as a residual, has another, though both add something."""
    result = epilogues(rewritten(({**ATTENTION, "bias": True}, {**MLP, "hidden": 32}), "*.{q,k,v,down}"))
    assert result == {"add_f32": {"p * scale + bias"}, "add_f32_2": {"x_ + p * scale"}}


def test_factors_are_told_apart() -> None:
    half, whole = {**MLP, "hidden": 32, "residual": 0.5}, {**ATTENTION, "residual": 0.25}
    result = epilogues(rewritten((whole, half), "*.{out,down}"))
    assert result == {"add_f32": {"x_ + 0.25 * (p * scale)"}, "add_f32_2": {"x_ + 0.5 * (p * scale)"}}


def test_only_what_may_be_a_view_is_laid_out_anew() -> None:
    """The stream that a block is given, not what a product of it wrote."""
    block = rewritten((ATTENTION, {**MLP, "hidden": 32}), "*.{out,up,down}").function("block.forward")
    laid = [node for node in block.nodes if isinstance(node.op, RowByRow)]
    assert [(node.name, node.inputs) for node in laid] == [("attention.out.x_rows", ("x",))]
    assert block.by_name["attention.out"].inputs[4] == laid[0].name
    assert block.by_name["mlp.down"].inputs[4] == "attention.out"
