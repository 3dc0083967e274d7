"""Every error of a spec at once: code, place, words, remedy; overrides; strictness of every model."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specc.compiler.errors import Diagnostic, Mark, SpecError
from specc.compiler.errors.codes import CODES
from specc.compiler.spec.check import check, load, to_diagnostics
from specc.compiler.spec.messages.expected import models_in
from specc.compiler.spec.spec import Spec
from specc.compiler.strict import Problem
from specc.compiler.text.source import read

ROOT = Path(__file__).parents[3]
SPECS = sorted((ROOT / "specs").glob("*.yaml"))
BASE = """\
spec_version: 2
name: tiny
targets: [cpu]
model:
  kind: decoder
  vocab: 257
  dim: 64
  context: 32
  embed: [{kind: token}]
  blocks:
    count: 2
    layers:
      - kind: attention
        heads: 4
        kv_heads: 2
        rope: {dims: 8}
      - {kind: mlp, ratio: 4, act: relu(x) ** 2}
train:
  tokens_per_step: 1024
  steps: 10
  optimizers: [{kind: adamw, match: "*", lr: 0.001}]
"""


def errors_of(text: str, *overrides: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(SpecError) as caught:
        load(text, overrides)
    return caught.value.diagnostics


def edited(*edits: tuple[str, str]) -> str:
    text = BASE
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    return text


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_the_specs_load(path: Path) -> None:
    spec, source = load(path)
    assert spec.name == path.stem
    assert source.file == str(path)


def test_a_key_with_the_name_of_the_kind_is_no_part_of_a_place() -> None:
    """`decoder` is the kind of the model, and here also a key, with a list as in a model of two stacks."""
    text = edited(("  dim: 64\n", "  decoder: [{kind: token}]\n"))
    said = {(error.code, error.message) for error in errors_of(text)}
    assert said == {("S101", "`decoder` is not a valid key of `model`"), ("S102", "`model` needs the key `dim`")}


def test_ten_errors_in_one_run() -> None:
    text = edited(
        ("name: tiny", "name: Tiny"),
        ("[cpu]", "[cpu, sm91]"),
        ("vocab: 257", "vocab: 1"),
        ("dim: 64", "dim: '64'"),
        ("kind: token", "kind: tokn"),
        ("count: 2", "count: two"),
        ("heads: 4", "haeds: 4"),
        ("relu(x) ** 2", "relu(x) ** 2 + z"),
        ("steps: 10", "steps: 10.0"),
        ("lr: 0.001", "lr: '1e-3'"),
    )
    results = [(problem.code, problem.mark) for problem in errors_of(text)]
    assert results == [
        ("S104", Mark(2, 7)),
        ("S104", Mark(3, 16)),
        ("S104", Mark(6, 10)),
        ("S103", Mark(7, 8)),
        ("S105", Mark(9, 18)),
        ("S103", Mark(11, 12)),
        ("S101", Mark(14, 9)),
        ("S107", Mark(17, 51)),
        ("S103", Mark(20, 10)),
        ("S107", Mark(21, 47)),
    ]


def test_rules_across_fields_show_beside_schema_errors_elsewhere() -> None:
    result = errors_of(edited(("heads: 2", "heads: 3"), ("lr: 0.001", "lr: fast"), ("dims: 8", "dims: 7")))
    assert [problem.code for problem in result] == ["S211", "S213", "S107"]


def test_a_key_from_another_level_is_sent_home() -> None:
    (problem,) = errors_of(edited(("  dim: 64", "  dim: 64\n  heads: 4")))
    assert (problem.code, problem.mark) == ("S101", Mark(8, 3))
    assert problem.hint == "`heads` belongs under `model.blocks.layers.0`; or did you mean `head`?"
    (problem,) = errors_of(edited(("  steps: 10", "  steps: 10\n  fuse: []")))
    assert problem.hint == "`fuse` belongs at the top"
    (problem,) = errors_of(edited(("  steps: 10", "  steps: 10\n  warmup_steps: 1")))
    assert problem.hint == "`warmup_steps` belongs under `train.schedule`"


def test_a_misspelled_key_is_not_missing_as_well() -> None:
    (problem,) = errors_of(edited(("vocab: 257", "vocabb: 257")))
    assert (problem.code, problem.hint) == ("S101", "did you mean `vocab`?")


@pytest.mark.parametrize(
    ("old", "new", "code", "message", "hint"),
    [
        ("dim: 64", "dim: '64'", "S103", "`dim` must be a whole number, not the text `64`", "write 64 without quotes"),
        ("dim: 64", "dim: 1_024", "S103", "`dim` must be a whole number, not the text `1_024`", "write 1024"),
        ("dim: 64", "dim: 64.0", "S103", "`dim` must be a whole number, not 64.0", "write 64"),
        ("dim: 64", "dim: true", "S103", "`dim` must be a whole number, not true", "write a whole number"),
        ("dim: 64", "dim:", "S103", "`dim` must be a whole number, not nothing", "write a value, or remove the key"),
        (
            "dim: 64",
            "dim: [64]",
            "S103",
            "`dim` must be a whole number, not a list of length 1",
            "write a whole number",
        ),
        ("name: tiny", "name: 7", "S103", "`name` must be text, not 7", 'put it in quotes: "7"'),
        ("[cpu]", "cpu", "S103", "`targets` must be a list, not the text `cpu`", "put it in brackets: [cpu]"),
        ("{dims: 8}", "8", "S103", "`rope` must be a mapping, not 8", "write a mapping"),
        ("[cpu]", "[]", "S104", "`targets` must be a list of length at least 1, not a list of length 0", "add an item"),
        (
            "dim: 64",
            "dim: 0",
            "S104",
            "`dim` must be more than 0, not 0",
            "write a number that is above 0 and at most 131072",
        ),
        ("lr: 0.001", "lr: .inf", "S104", "`lr` must be a finite number, not inf", "change it to a finite number"),
        ("lr: 0.001", "lr: 1, betas: [0.9]", "S104", "`betas` has too few items, only 1", "add item 2"),
        ("kind: decoder", "kind: encoder", "S105", "`model` has an unknown kind, `encoder`", "did you mean `decoder`?"),
        (
            "kind: mlp, ",
            "",
            "S102",
            "`model.blocks.layers.1` needs the key `kind`",
            "add `kind:` with `attention`, `latent`, `mlp` or `moe`",
        ),
        ("relu(x)", "relux(x)", "S107", "`act`: unknown function relux", "did you mean relu?"),
        ("relu(x) ** 2", "'1'", "S106", "`act`: an activation must read x", "correct the value"),
    ],
)
def test_words(old: str, new: str, code: str, message: str, hint: str) -> None:
    (problem,) = errors_of(edited((old, new)))
    assert (problem.code, problem.message) == (code, message)
    assert hint in problem.hint


def test_a_union_is_judged_by_what_the_value_looks_like() -> None:
    muon = '{kind: muon, match: "*", lr: 1, momentum: MOMENTUM}'

    def say(momentum: str) -> list[str]:
        text = edited(('{kind: adamw, match: "*", lr: 0.001}', muon.replace("MOMENTUM", momentum)))
        return [f"{problem.code} {problem.message}" for problem in errors_of(text)]

    assert say("fast") == ["S107 `momentum`: unknown variable fast"]
    assert say("'0.9'") == ["S107 `momentum`: `0.9` is text, but not a formula in t"]
    assert say("1 + t") == ["S107 `momentum`: the value is 1.01 at t = 0.01"]
    assert say("2") == ["S104 `momentum` must be at most 1, not 2"]
    assert say("{at: [[0, 1]], step: 3}") == ["S101 `step` is not a valid key of `train.optimizers.0.momentum`"]
    assert say("{at: [[0, x]]}") == ["S103 `at.0.1` must be a number, not the text `x`"]


def test_problems_become_diagnostics_at_their_paths() -> None:
    source = read(BASE, "tiny.yaml")
    problems = (
        Problem(("model", "dim"), "S210", "m", "h", (("here", ("train", "steps")),)),
        Problem(("model", "blocks"), "S207", "m", "h"),
        Problem(("model", "blocks", "norm", "eps"), "S207", "m", "h"),
        Problem(("train", "optimizers", 0), "S207", "m", "h"),
        Problem((), "S207", "m", "h"),
    )
    result = to_diagnostics(problems, source)
    assert [problem.mark for problem in result] == [Mark(7, 8), Mark(10, 3), Mark(10, 3), Mark(21, 16), Mark(1, 1)]
    assert result[0] == Diagnostic("S210", "m", "h", "tiny.yaml", Mark(7, 8), (("here", Mark(20, 10)),))


def test_checking_leaves_torch_alone() -> None:
    code = "import sys; from specc.compiler.spec.check import load; load(sys.argv[1]); exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, BASE], check=True)


def test_data_of_any_shape_is_checked_without_a_crash() -> None:
    rng = random.Random(3)

    def junk(depth: int) -> Any:
        kind = rng.randrange(9 if depth else 6)
        if kind < 6:
            return rng.choice((None, True, 0, -1.5, "x", "kind", "decoder", 10**30, ""))
        if kind < 8:
            keys = ("kind", "model", "train", "quant", "default", "scheme", "match", "blocks", "layers", "gptq", "x")
            return {rng.choice(keys): junk(depth - 1) for _ in range(rng.randrange(5))}
        return [junk(depth - 1) for _ in range(rng.randrange(4))]

    for _ in range(400):
        data = {"spec_version": 2, "model": junk(4), "quant": junk(4), "train": junk(4), "fuse": junk(3)}
        for problem in errors_of(json.dumps(data, indent=1)):
            assert problem.code in CODES and problem.message and problem.hint


def test_check_reports_in_the_order_of_the_file() -> None:
    result = errors_of(edited(("steps: 10", "steps: x"), ("name: tiny", "name: 1"), ("dim: 64", "dim: x")))
    assert [problem.mark.line for problem in result] == [2, 7, 20]
    assert check(read(BASE)).name == "tiny"
    assert models_in(Spec) == [Spec]


@pytest.mark.parametrize("key", ["ratio", "hidden"])
def test_an_mlp_that_is_too_wide_is_reported_at_the_key_that_sets_its_width(key: str) -> None:
    text = edited(("ratio: 4", f"{key}: 100000000"))
    (error,) = errors_of(text)
    column = text.splitlines()[error.mark.line - 1].index(f"{key}:") + 1
    assert (error.code, error.hint) == ("S215", f"choose a smaller `{key}`") and error.mark.column >= column


def test_a_missing_or_unknown_kind_hides_no_other_errors() -> None:
    text = edited(
        ("kind: decoder", "kind: decodr"), ("dim: 64", "dim: '64'"), ("{kind: token}", "{kind: tokn, initt: 1}")
    )
    assert [(problem.code, problem.mark) for problem in errors_of(text)] == [
        ("S105", Mark(5, 9)),
        ("S103", Mark(7, 8)),
        ("S105", Mark(9, 18)),
        ("S101", Mark(9, 24)),
    ]
    text = edited(("kind: attention\n        heads: 4", "heads: '4'"), ("kind: decoder", "kind: xyz"))
    assert [(problem.code, problem.mark) for problem in errors_of(text)] == [
        ("S105", Mark(5, 9)),
        ("S102", Mark(13, 9)),
        ("S103", Mark(13, 16)),
    ]
    # also those that involve several fields, if the kind is certain
    across = ("kv_heads: 2", "kv_heads: 3"), ("ratio: 4", "ratio: 4, hidden: 8")
    for kind, codes in (("mpl", ["S211", "S105", "S214"]), ("recurrence", ["S105"])):
        assert [problem.code for problem in errors_of(edited(*across, ("kind: mlp", f"kind: {kind}")))] == codes


def test_a_value_that_may_be_of_several_kinds_has_no_other_errors() -> None:
    (problem,) = errors_of(edited(("{kind: mlp, ratio: 4, act: relu(x) ** 2", "{kind: recurrence, input: 4")))
    assert problem.code == "S105"
