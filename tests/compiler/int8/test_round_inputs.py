"""Training with int8 products ahead: which inputs are rounded, from when on, by whose scales, and what is refused."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from int8_models import ADDITIVE, BLOCKS, LSTM, QUANT, data_of
from tiny_models import ATTENTION, FUSE_MLP, MLP, spec_data, spec_of

from specc.compiler import pipeline
from specc.compiler.build import compile_loaded
from specc.compiler.int8.products import integer_products
from specc.compiler.ir.graph import node_of
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.region import Fused
from specc.compiler.ops.rounded import RoundRows
from specc.compiler.passes.assign_quant import allocation
from specc.compiler.programs.programs import LoweringError, Phase, Programs, flatten
from specc.runtime.artifact.deployment import Deployment

HALF: dict[str, Any] = {"steps": 100, "schedule": {"warmdown_fraction": 0.6}, "qat": {"below": 0.5}}


def lowered(model: Mapping[str, Any], quant: Mapping[str, Any] = QUANT, **train: Any) -> Programs:
    data = data_of(model, quant)
    data["train"] |= {**HALF, **train}
    return pipeline.run(spec_of(data), "cpu")


def decoder(**train: Any) -> dict[str, Any]:
    data = spec_data((ATTENTION, {**MLP, "hidden": 16}), fuse=(FUSE_MLP,))
    rule = {"match": "embed.token", "scheme": "none", "dtype": "f32"}
    data["quant"] = {"default": {"scheme": "int8"}, "rules": [rule]}
    data["train"] |= {**HALF, **train}
    return data


@pytest.mark.parametrize("model", [LSTM, BLOCKS], ids=["lstm", "blocks"])
def test_every_int8_product_of_training_reads_a_rounded_value(model: Mapping[str, Any]) -> None:
    """With the scale that the deployed product has, and every other node is that of the plain program."""
    programs = lowered(model)
    lower = pipeline.lower(spec_of(data_of(model)), "cpu")
    sources = {s.weight: s for s in integer_products(lower, allocation(spec_of(data_of(model)).quant, lower.params))}
    graph = flatten(programs, programs.program("train_rounded"))
    steps = [flatten(programs, g, at="loop") for g in programs.functions if g.name.endswith("_rounded.step")]
    seen = set()
    for part in (graph, *steps):
        for node in part.nodes:
            if isinstance(node.op, Linear) and (part is not graph or node.inputs[1][1:] in sources):
                maker = part.by_name[node_of(node.inputs[0])]
                assert isinstance(maker.op, RoundRows)
                if part is graph:
                    source = sources[node.inputs[1][1:]]
                    assert maker.inputs[1] == f"@{source.leader}_inverse"
                    seen.add(source.weight)
    loops = [node for node in graph.nodes if node.op.name == "scan"]
    for loop in loops:
        weight, inverse = loop.inputs[-2:]
        assert inverse == f"{weight}_inverse"
        seen.add(weight[1:])
    assert seen == sources.keys() and len(loops) == (3 if model is LSTM else 0)
    assert {name for name, _ in programs.buffers} == {f"{source.leader}_inverse" for source in sources.values()}
    assert not {name for name, _ in programs.buffers} & {param.name for param in programs.params}


def test_it_begins_when_the_warm_down_says() -> None:
    plain, last = lowered(LSTM).phases
    assert plain == Phase(0.7, "train", "score") and last == Phase(1.0, "train_rounded", "score", rounds=True)
    clock = lowered(LSTM, steps=None, budget_seconds=50.0, qat={"below": 0.25}).phases
    assert [phase.until for phase in clock] == [0.85, 1.0]
    (whole,) = lowered(LSTM, schedule={"warmdown_fraction": 1.0}, qat={"below": 1.0}).phases
    assert whole.train == "train_rounded"


@pytest.mark.parametrize("more", [{"qat": None}, {"qat": {"below": 0.5, "inputs": False}}])
def test_other_specs_are_as_they_were(more: dict[str, Any]) -> None:
    """Without qat, with qat of weights alone, and with qat of a scheme that rounds no inputs."""
    plain = lowered(LSTM, **more)
    assert plain.phases == () and plain.buffers == () and "train_rounded" not in plain.whole
    data = data_of(BLOCKS, {**QUANT, "default": {"scheme": "round", "bits": 6}})
    results = []
    for train in (HALF, {}):
        results.append(
            compile_loaded(spec_of({**data, "train": {**data["train"], **train}}), None).files["cpu/model.py"]
        )
    assert results[0] == results[1]


def test_the_plain_program_is_the_one_without_qat() -> None:
    """Its text too, so that training before rounds costs nothing."""
    rounded_graph, other = (lowered(LSTM, **more) for more in ({}, {"qat": None}))
    assert all(str(rounded_graph.program(graph.name)) == str(graph) for graph in other.programs)


def test_fusion_points_stay_with_the_programs_that_do_not_round() -> None:
    programs = pipeline.run(spec_of(decoder()), "cpu")
    fused = {g.name: any(isinstance(node.op, Fused) for node in g.nodes) for g in programs.functions}
    assert fused["block.forward"] and not fused["block.forward_rounded"]
    names = {node.name for node in programs.function("block.forward_rounded").nodes}
    assert {"mlp.up_input", "mlp.down_input", "attention.q_input", "attention.out_input"} <= names
    assert "train_rounded" in compile_loaded(spec_of(decoder()), None).files["cpu/model.py"]


def test_a_loop_that_begins_late_is_rounded_as_it_is_then() -> None:
    data = decoder()
    data["model"]["blocks"] |= {"count": 3, "order": {"at": [[0, "0..2"], [0.8, "0..1 1 2"]]}}
    data["fuse"] = []
    results = [(phase.until, phase.train, phase.rounds) for phase in pipeline.run(spec_of(data), "cpu").phases]
    assert results == [
        (0.7, "train_once", False), (0.8, "train_once_rounded", True), (1.0, "train_rounded", True)
    ]  # fmt: skip


def test_what_cannot_be_rounded_is_refused() -> None:
    with pytest.raises(LoweringError) as error:
        lowered(ADDITIVE)
    (problem,) = error.value.problems
    assert problem.code == "S274" and problem.path == ("train", "qat")
    assert "the inputs of decoder.step.additive.query and decoder.step.lstm.cell" in problem.message
    (pattern,) = re.findall(r'match: ("[^"]*")', problem.hint)
    exempt = {"match": json.loads(pattern), "scheme": "none", "dtype": "f32"}
    assert "train_rounded" in lowered(ADDITIVE, {**QUANT, "rules": [*QUANT["rules"], exempt]}).whole


def test_what_a_decoder_writes_is_rounded_where_it_is_fed_that() -> None:
    """Teacher forcing: with programs of its own, whose single steps of an LSTM round what its loop rounds."""
    programs = lowered(LSTM, teacher_forcing={"at": [[0, 1.0], [50, 0.5]], "by": "step"})
    assert [phase.writes for phase in programs.phases] == [("encode", "extend"), ("encode_rounded", "extend_rounded")]
    assert "extend_rounded" not in programs.whole
    whole, step = (flatten(programs, programs.program(name)) for name in ("train_rounded", "extend_rounded"))
    scales = [{node.inputs[1] for node in graph.nodes if isinstance(node.op, RoundRows)} for graph in (whole, step)]
    loops = {node.inputs[-1] for node in whole.nodes if node.op.name == "scan"}
    assert scales[1] - {"@decoder.lstm.hidden_inverse"} <= scales[0] and "@decoder.lstm.hidden_inverse" in loops
    assert not any(node.op.name == "lstm_cell" for node in step.nodes)
    for given in (None, 1.0):
        assert "extend_rounded" not in {graph.name for graph in lowered(LSTM, teacher_forcing=given).programs}


def test_with_nothing_to_round_there_is_no_such_training() -> None:
    with pytest.raises(LoweringError) as error:
        lowered(LSTM, {"default": {"scheme": "none", "dtype": "f16"}})
    (problem,) = error.value.problems
    assert problem.code == "S244" and problem.path == ("train", "qat") and "f16" in problem.message


def test_what_ships_asks_for_no_training() -> None:
    """A run whose inputs cannot be rounded in training can be quantized to int8 all the same."""
    data = data_of(ADDITIVE, QUANT)
    plain = Deployment.of(spec_of(data))
    data["train"] |= HALF
    assert Deployment.of(spec_of(data)) == plain
    with pytest.raises(LoweringError) as error:
        lowered(LSTM, steps=None, budget_seconds=50.0, schedule={"warmdown_steps": 40})
    (problem,) = error.value.problems
    assert problem.code == "S273" and problem.path == ("train", "schedule", "warmdown_steps")
