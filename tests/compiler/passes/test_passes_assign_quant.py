"""Storage: which scheme takes each parameter, and every way in which rules can be wrong."""

from typing import Any

import pytest
from tiny_models import spec_data, spec_of

from specc.compiler import pipeline
from specc.compiler.passes.assign_quant import allocation, storage_name
from specc.compiler.programs.programs import LoweringError
from specc.compiler.quant.none import Unquantized
from specc.compiler.quant.round import Round
from specc.compiler.strict import Problem

INT8 = {"scheme": "round", "bits": 8}


def quantized(quant: dict[str, Any] | None, **words: Any) -> dict[str, str]:
    """Parameter name -> storage, after the pass."""
    data = spec_data(**words)
    if quant is not None:
        data["quant"] = quant
    return {param.name: param.storage for param in pipeline.run(spec_of(data), "cpu", "assign_quant").params}


def refused(quant: dict[str, Any], **words: Any) -> tuple[Problem, ...]:
    with pytest.raises(LoweringError) as caught:
        quantized(quant, **words)
    return caught.value.problems


def test_without_a_quant_section_all_is_f32() -> None:
    assert set(quantized(None).values()) == {"f32"}


def test_a_rule_holds_before_the_default() -> None:
    rules = [
        {"match": "embed.*", **INT8},
        {"match": "*.{up,down}", "scheme": "gptq", "bits": 6},
        {"match": "blocks.1.attention.q", "scheme": "none", "dtype": "f16"},
    ]
    result = quantized({"default": {"scheme": "gptq", "bits": 5}, "rules": rules})
    assert result == {
        "embed.token": "int8",
        "blocks.0.attention.q": "int5",
        "blocks.0.attention.k": "int5",
        "blocks.0.attention.v": "int5",
        "blocks.0.attention.out": "int5",
        "blocks.0.mlp.up": "int6",
        "blocks.0.mlp.down": "int6",
        "blocks.1.attention.q": "f16",
        "blocks.1.attention.k": "int5",
        "blocks.1.attention.v": "int5",
        "blocks.1.attention.out": "int5",
        "blocks.1.mlp.up": "int6",
        "blocks.1.mlp.down": "int6",
    }


def test_the_pass_changes_the_table_alone() -> None:
    data = spec_data()
    data["quant"] = {"default": INT8}
    before, after = (pipeline.run(spec_of(data), "cpu", until) for until in ("lower", "assign_quant"))
    assert before.graphs == after.graphs
    assert [param.storage for param in before.params] == [""] * len(before.params)
    assert [(p.name, p.shape) for p in before.params] == [(p.name, p.shape) for p in after.params]


def test_a_rule_that_matches_nothing() -> None:
    (problem,) = refused({"default": INT8, "rules": [{"match": "*.router", **INT8}]})
    assert (problem.code, problem.path) == ("S305", ("quant", "rules", 0, "match"))
    assert problem.message == "the rule `*.router` matches no parameter"
    assert problem.hint == "the parameters have names such as blocks.0.attention.q, blocks.1.attention.q, embed.token"


def test_two_rules_on_one_parameter_are_told_with_both_places() -> None:
    rules = [{"match": "blocks.*", **INT8}, {"match": "*.up", "scheme": "round", "bits": 4}]
    (problem,) = refused({"default": INT8, "rules": rules})
    assert (problem.code, problem.path) == ("S306", ("quant", "rules", 1, "match"))
    assert problem.message == "the rules `blocks.*` and `*.up` both match blocks.0.mlp.up"
    assert problem.related == (("the first rule", ("quant", "rules", 0, "match")),)


def test_a_scheme_that_cannot_take_a_parameter_is_told_once_a_rule() -> None:
    layers = ({"kind": "attention", "heads": 2, "residual": "learned"}, {"kind": "mlp", "hidden": 12, "act": "relu(x)"})
    (problem,) = refused({"default": {"scheme": "gptq", "bits": 5}}, layers=layers)
    assert (problem.code, problem.path) == ("S307", ("quant", "default"))
    assert problem.message.startswith("blocks.0.attention.residual: ")
    assert '"*.residual"' in problem.hint


def test_a_table_that_is_only_looked_up_is_solved_by_its_lookups() -> None:
    embed = [{"kind": "token"}, {"kind": "bigram", "buckets": 32, "dim": 4}]
    rules = [{"match": "*.scale", "scheme": "none", "dtype": "f16"}]
    quant = {"default": {"scheme": "gptq", "bits": 5}, "rules": rules}
    result = quantized(quant, embed=embed, head={"tied": False})
    assert result["embed.bigram.table"] == result["embed.token"] == result["head.logits"] == "int5"


@pytest.mark.parametrize(
    ("wish", "code", "path"),
    [
        ({"allocate": {"match": "zzz.*"}}, "S305", ("allocate", "match")),
        ({"allocate": {"bits": [2, 3]}}, "S311", ("allocate", "bits")),
        ({"allocate": {"bits": [2, 3]}, "rules": [{"match": "embed.token", **INT8}]}, "S311", ("allocate", "bits")),
        ({"allocate": {"bits": [3, 4]}}, "S311", ("allocate", "bits")),
        ({"allocate": {"bits": [3, 4]}, "rules": [{"match": "embed.token", **INT8}]}, "", ()),
        ({"allocate": {"bits": [4, 5], "match": "embed.token"}}, "S311", ("allocate", "bits")),
        ({"allocate": {"bits": [2, 6], "clip_stds": [9, 12]}}, "", ()),
        ({"allocate": {"bits": [3, 4, 5], "match": "*.up"}}, "", ()),
        ({"correct": {"match": "zzz"}}, "S305", ("correct", "match")),
        ({"correct": {"count": 3, "match": "*.up"}}, "S311", ("correct", "count")),
        ({"correct": {"count": 1, "match": "embed.token"}}, "S311", ("correct", "count")),
        ({"correct": {"count": 2, "match": "*.up"}}, "", ()),
        ({"correct": {"rank": 8, "count": 10}}, "", ()),
        ({"correct": {"rank": 9, "count": 1}}, "S311", ("correct", "rank")),
        ({"promote": {"bits": 6, "count": 2, "match": "*.up"}}, "", ()),
        ({"promote": {"bits": 6, "count": 1, "match": "*.router"}}, "S305", ("promote",)),
    ],
)
def test_what_is_left_to_choose_can_be_chosen(wish: dict[str, Any], code: str, path: tuple[str, ...]) -> None:
    rules = [{"match": "embed.token", "scheme": "none", "dtype": "f16"}]
    quant = {"default": {"scheme": "gptq", "bits": 5}, "rules": rules, "budget_bytes": 10_000, **wish}
    if not code:
        quantized(quant)
        return
    (problem,) = refused(quant)
    assert (problem.code, problem.path) == (code, ("quant", *path)) and problem.hint


def test_the_hint_about_a_scheme_of_one_width_names_this_width() -> None:
    rules = [{"match": "embed.token", "scheme": "none", "dtype": "f16"}]
    quant = {"default": {"scheme": "int8"}, "rules": rules, "allocate": {"bits": [4, 5]}, "budget_bytes": 10_000}
    assert [problem.hint for problem in refused(quant)] == ["use 8 bits, or narrow the `match` of `allocate`"]


def test_what_no_calibration_sees_gets_no_bits() -> None:
    """A promotion goes by the Hessian of a product, which a table that is only looked up is no weight of."""
    wish = {"promote": {"bits": 6, "count": 1, "match": "embed.*"}}
    quant = {"default": {"scheme": "round", "bits": 5}, "budget_bytes": 10_000, **wish}
    quantized(quant)
    (problem,) = refused(quant, head={"tied": False}, name="untied")
    assert problem.code == "S311" and "calibration" in problem.message


@pytest.mark.parametrize("tied", [True, False])
def test_bits_are_allocated_to_what_is_looked_up_too(tied: bool) -> None:
    def problems(match: str, bits: list[int]) -> list[Problem]:
        quant = {"default": {"scheme": "round", "bits": 5}, "budget_bytes": 10_000, "rules": rules}
        quant["allocate"] = {"bits": bits, "match": match}
        try:
            quantized(
                quant, head={"tied": tied}, embed=[{"kind": "token"}, {"kind": "bigram", "buckets": 32, "dim": 4}]
            )
        except LoweringError as error:
            return list(error.problems)
        return []

    rules = [{"match": "*.scale", "scheme": "none", "dtype": "f16"}]
    assert problems("embed.{token,bigram.table}", [4, 5]) == problems("*.table", [4, 5]) == []
    (problem,) = problems("*.scale", [4, 5])
    assert problem.code == "S311" and "product or lookup" in problem.message


def test_all_problems_are_told_at_once() -> None:
    rules = [{"match": "nothing", **INT8}, {"match": "*.up", **INT8}, {"match": "*.{up,q}", **INT8}]
    assert [problem.code for problem in refused({"default": INT8, "rules": rules})] == ["S305", "S306"]


def test_names_of_storage() -> None:
    assert storage_name(Unquantized(scheme="none", dtype="f16")) == "f16"
    assert storage_name(Round(scheme="round", bits=8)) == "int8"


def test_the_allocation_is_the_spec_value_itself() -> None:
    data = spec_data()
    data["quant"] = {"default": INT8, "rules": [{"match": "embed.token", "scheme": "none", "dtype": "bf16"}]}
    spec = spec_of(data)
    chosen = allocation(spec.quant, pipeline.lower(spec, "cpu").params)
    assert spec.quant is not None
    assert chosen["embed.token"] is spec.quant.rules[0]
    assert chosen["blocks.0.mlp.up"] is spec.quant.default
