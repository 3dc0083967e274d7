"""`--set path=value`: what it changes, and errors that name it."""

import json
from pathlib import Path

import pytest

from specc.compiler.errors import Diagnostic, SpecError, render
from specc.compiler.spec.check import load
from specc.compiler.text.overrides import apply_overrides
from specc.compiler.text.source import read

BASE = (Path(__file__).parents[3] / "specs" / "gpt_mini.yaml").read_text()


def errors_of(*overrides: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(SpecError) as caught:
        load(BASE, overrides)
    return caught.value.diagnostics


def test_overrides_change_add_and_replace() -> None:
    sets = ["train.steps=200", "model.blocks.count=4", "model.blocks.layers.1.ratio=3.5", "train.steps=300"]
    spec, _ = load(
        BASE, [*sets, "model.head={softcap: 15}", "train.schedule.floor=0.1", "fuse=[{blocks.*.mlp: [up, act]}]"]
    )
    assert (spec.train.steps, spec.model.blocks.count, spec.model.blocks.layers[1].ratio) == (300, 4, 3.5)
    assert (spec.model.head.softcap, spec.train.schedule.floor) == (15, 0.1)
    assert spec.fuse == ({"blocks.*.mlp": ("up", "act")},)


def test_an_item_behind_the_last_is_appended() -> None:
    changes = "model.blocks.changes"
    first = [f"{changes}.0.where=layer == 1", f"{changes}.0.mlp.hidden=64", f"{changes}.0.mlp.ratio="]
    spec, _ = load(BASE, [*first, f"{changes}.+={{where: layer >= 2, mlp: {{act: gelu(x)}}}}"])
    assert [change.where for change in spec.model.blocks.changes] == ["layer == 1", "layer >= 2"]
    assert spec.model.blocks.every[1].layers[1].hidden == 64 and spec.model.blocks.every[2].layers[1].act == "gelu(x)"
    (error,) = errors_of(f"{changes}.1.where=layer == 1")
    assert error.code == "S014" and "it has 0 items" in error.hint and "`+` appends" in error.hint


def test_a_key_with_dots_can_be_overridden() -> None:
    source = apply_overrides(read("a: {b.*.c: [1, 2], b: 3}"), ["a.b.*.c.1=5", "a.b=4"])
    assert source.data == {"a": {"b.*.c": (1, 5), "b": 4}}


def test_what_is_overridden_is_unchanged_elsewhere() -> None:
    source = read(BASE)
    before = json.dumps(source.data)
    assert json.dumps(apply_overrides(source, ["model.dim=128", "name=other"]).data) != before
    assert json.dumps(source.data) == before


@pytest.mark.parametrize(
    ("override", "code", "column", "hint"),
    [
        ("train.stepz=5", "S101", 7, "did you mean `steps`?"),
        ("trian.steps=5", "S101", 1, "did you mean `train`?"),
        ("train.steps=many", "S103", 13, "write a whole number"),
        ("model.dim=", "S103", 7, "write a value"),
        ("model.blocks.layers.1.act=relu(x) + q", "S107", 37, "choose from"),
        ("model.blocks.layers.0.heads=7", "S210", 29, "choose a divisor"),
        ("model.blocks.layers.7.heads=8", "S014", 21, "it has 2"),
        ("model.blocks.layers.one.heads=8", "S014", 21, "it has 2"),
        ("train.steps.more=1", "S014", 13, "end the path there"),
        ("train.steps=[1", "S007", 13, "the `]`"),
        ("train.steps=*x", "S009", 13, 'quote the text: "*x"'),
        ("train.optimizers.0={match: *.{q,k}, lr: 1}", "S009", 28, 'quote the text: "*.{q,k}"'),
        ('quant.rules=[{bits:[4, 5], match: "x"}]', "S007", 19, "write `key: value`, with a space"),
        ("train.steps", "S014", 1, "--set path=value"),
        ("=5", "S014", 1, "--set path=value"),
    ],
)
def test_a_wrong_override_is_named(override: str, code: str, column: int, hint: str) -> None:
    problem = errors_of(override)[0]
    assert problem.file.startswith("--set")
    assert (problem.code, problem.mark.line, problem.mark.column) == (code, 1, column)
    assert hint in problem.hint
    with pytest.raises(SpecError) as caught:
        load(BASE, [override])
    assert override in render(caught.value), "the snippet shows the override itself"
