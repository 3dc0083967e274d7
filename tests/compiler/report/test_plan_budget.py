"""Warnings of the plan about a byte budget that no choice of bits fits."""

from pathlib import Path

import pytest

from specc.compiler.build import compile_spec
from specc.compiler.passes.assign_quant import allocation
from specc.compiler.report.summary import Summary, lines

GOLF = Path(__file__).parents[3] / "specs" / "gpt_mlp35.yaml"
GATED = "model.blocks.layers.1.act=silu(gate) * x"
CHANGE = (
    "{where: layer >= 2, learn: {skip.scale: {init: 1}}, attention: {learn: {value_scale: {shape: 1, init: 1}}, "
    "v: v + value_scale * (attention_values.scale * attention_values.project)}, "
    "read: mix.stream * (x + skip.scale * output(3 - layer)) + mix.embedded * x0}"
)
SMALL = (
    *("targets=[cpu]", "model.dim=128", "model.blocks.count=4", f"model.blocks.changes=[{CHANGE}]"),
    *("quant.default={scheme: gptq, bits: 5}", "quant.allocate={bits: [4, 5, 6, 7], match: blocks.*}"),
    'quant.rules.+={match: "{embed.token,*.table}", scheme: round, bits: 8}',
)


def warned(*sets: str) -> list[str]:
    built = compile_spec(GOLF, (*SMALL, *sets))
    shown = lines(Summary(built.spec, built.plans, {}))
    assert len(shown) <= 25
    return [line for line in shown if "may not fit" in line or "fixed by rules" in line]


def least(*sets: str) -> int:
    """The bytes of everything by estimate, blocks' matrices at 4 bits."""
    built = compile_spec(GOLF, (*SMALL, *sets))
    params = built.plans["cpu"].programs.params
    schemes = allocation(built.spec.quant, params)
    fewest = {p.name: schemes[p.name] for p in params}
    for name, scheme in fewest.items():
        if name.startswith("blocks.") and scheme.needs_hessian:
            fewest[name] = scheme.with_bits(4)
    arrays = sum(fewest[p.name].estimate_bytes(p.shape) for p in params)
    return arrays + Summary(built.spec, built.plans, {}).storage.overhead


@pytest.mark.parametrize("choice", ["allocate", "promote"])
def test_bytes_before_a_choice_are_not_told_as_those_of_the_artifact(choice: str) -> None:
    """A choice of more bits takes more bytes, up to the budget."""
    other = "promote" if choice == "allocate" else "allocate"
    wish = {"allocate": "{bits: [5, 8]}", "promote": "{count: 2, bits: 8}"}
    for sets, by_rules in (((f"quant.{choice}={wish[choice]}",), True), ((f"quant.{choice}=null",), False)):
        built = compile_spec(GOLF, (*SMALL, "quant.correct=null", f"quant.{other}=null", *sets))
        (line,) = (line for line in lines(Summary(built.spec, built.plans, {})) if line.startswith("artifact "))
        assert ("with the bits of the rules" in line) == by_rules


@pytest.mark.parametrize("more", [(), (GATED,)])
def test_only_what_cannot_fit_at_the_fewest_bits_is_warned_of(more: tuple[str, ...]) -> None:
    size = least(*more)
    assert warned(*more, f"quant.budget_bytes={size}") == []
    first, second = warned(*more, f"quant.budget_bytes={size - 1}")
    assert f"about {size:,} bytes with" in first
    assert "embed.token" in second and "blocks." not in second


def test_what_a_rule_keeps_from_it_is_named_first() -> None:
    override = 'quant.rules.0.match="*.{residual,scale,q_gain,value_scale,gate,stream,embedded,project}"'
    size = least(GATED, override)
    _, second = warned(GATED, override, f"quant.budget_bytes={size - 1}")
    bytes_ = 4 * 448 * 128 * 2
    assert second.startswith(f"  fixed by rules: blocks.*.mlp.gate {bytes_:,} (f16); ")


def test_the_gate_of_an_mlp_is_as_its_other_matrices() -> None:
    """gpt_mlp35 keeps the gate of its smearing, a vector, and of either form."""
    built = compile_spec(GOLF, (*SMALL, GATED))
    storage = {param.name: param.storage for param in built.plans["cpu"].programs.params}
    assert storage["blocks.0.mlp.gate"] == storage["blocks.0.mlp.up"] == "int5"
    assert storage["embed.smear.gate"] == "f16"
    by_token = "model.embed=[{kind: token}, {kind: bigram, buckets: 64, dim: 16}, {kind: norm}, {kind: smear_by_token}]"
    built = compile_spec(GOLF, (*SMALL, by_token))
    assert {p.name: p.storage for p in built.plans["cpu"].programs.params}["embed.smear_by_token.gate"] == "f16"


@pytest.mark.parametrize(
    ("spec", "changes", "hint"),
    [
        ("poly_attn", (), "give some parameters a scheme with fewer bits, such as gptq or round"),
        ("gpt_mini", ("quant.promote=null", "quant.rules.0.bits=2"), "use `quant.allocate: {bits: [2, 4, 5]}`"),
        ("gpt_mini", ("quant.rules.0.bits=3",), "use `quant.allocate: {bits: [2, 3, 4, 5]}` instead of quant.promote"),
    ],
)
def test_without_an_allocation_the_hint_is_what_the_schemes_can_have(
    spec: str, changes: tuple[str, ...], hint: str
) -> None:
    built = compile_spec(GOLF.with_name(f"{spec}.yaml"), ("targets=[cpu]", "quant.budget_bytes=999", *changes))
    shown = lines(Summary(built.spec, built.plans, {}))
    assert f"  may not fit: {hint}, or raise quant.budget_bytes" in shown
