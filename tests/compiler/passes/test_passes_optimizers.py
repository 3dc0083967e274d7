"""Which optimizer owns each parameter, and what is told where one owns none or cannot."""

from typing import Any

import pytest
from tiny_models import ATTENTION, MLP, spec_data, spec_of

from specc.compiler import pipeline
from specc.compiler.passes.optimizers import owners
from specc.compiler.programs.programs import LoweringError

MUON = {"kind": "muon", "match": "blocks.*", "lr": 0.02}
REST = {"kind": "adamw", "match": "*", "lr": 0.01}
LAYERS = (ATTENTION, {**MLP, "residual": "learned"})


def owned(*optimizers: dict[str, Any]) -> dict[str, int]:
    data = spec_data(LAYERS)
    data["train"] = {**data["train"], "optimizers": list(optimizers)}
    spec = spec_of(data)
    shapes = {param.name: param.shape for param in pipeline.lower(spec, "cpu").params}
    return dict(owners(spec.train.optimizers, shapes))


def problems(*optimizers: dict[str, Any]) -> list[tuple[str, tuple[Any, ...], str]]:
    with pytest.raises(LoweringError) as caught:
        owned(*optimizers)
    return [(problem.code, problem.path, problem.message) for problem in caught.value.problems]


def test_the_first_pattern_that_covers_a_parameter_owns_it() -> None:
    result = owned({**MUON, "match": "blocks.0.*.{q,up}"}, {**REST, "match": "blocks.*"}, REST)
    assert [name for name, index in result.items() if index == 0] == ["blocks.0.attention.q", "blocks.0.mlp.up"]
    assert [name for name, index in result.items() if index == 2] == ["embed.token"]
    assert len(result) == 15


def test_an_optimizer_that_nothing_is_left_for() -> None:
    assert problems(REST, {**REST, "match": "embed.*"}) == [
        (
            "S308",
            ("train", "optimizers", 1, "match"),
            "the optimizer of `embed.*` matches no parameter, or only parameters of earlier optimizers",
        )
    ]
    assert problems({**REST, "match": "nope"}, REST) == [
        ("S308", ("train", "optimizers", 0, "match"), "the optimizer of `nope` matches no parameter")
    ]


def test_muon_takes_matrices_alone() -> None:
    assert problems(MUON, REST) == [
        (
            "S309",
            ("train", "optimizers", 0, "match"),
            "muon updates only matrices, but `blocks.*` also matches blocks.0.mlp.residual",
        )
    ]


def test_every_parameter_needs_one() -> None:
    assert problems({**REST, "match": "blocks.*"}) == [
        ("S310", ("train", "optimizers"), "no optimizer matches embed.token")
    ]
    assert problems({**REST, "match": "embed.*"}) == [
        ("S310", ("train", "optimizers"), "no optimizer matches blocks.0.attention.q and 13 more parameters")
    ]
