"""Groups of runs, what of them is compared, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from logged_runs import logged_run
from scipy import stats

from specc.cli.app import run
from specc.runtime.compare.comparison import Comparison, compare
from specc.runtime.compare.groups import CompareError, groups_of
from specc.runtime.compare.picture import comparison_picture
from specc.runtime.compare.report import report
from specc.runtime.run_facts import RunFacts
from specc.runtime.storage.evaluations import record_evaluation

A, B = (3.30, 3.31, 3.29), (3.27, 3.285, 3.28)
GELU = "model.blocks.layers.1.act=gelu(x)"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs of two specs each, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for seed, (a, b) in enumerate(zip(A, B, strict=True)):
        logged_run(tmp_path / f"base-{seed}", a, [f"train.seed={seed}"])
        logged_run(tmp_path / f"gelu-seed{seed}", b, [f"train.seed={seed}", GELU])
    return tmp_path


def compared(*words: str) -> Comparison:
    return compare(groups_of(words))[0]


def test_runs_that_differ_only_in_the_seed_are_one_group(runs: Path) -> None:
    groups = groups_of(["*-*"])
    assert [(group.name, [m.seed for m in group.members]) for group in groups] == [
        ("base", [0, 1, 2]),
        ("gelu", [0, 1, 2]),
    ]
    assert [group.name for group in groups_of(["base-0", "gelu-seed1,gelu-seed2"])] == ["base", "gelu"]


def test_a_name_makes_one_group(runs: Path) -> None:
    groups = groups_of(["new=gelu-*", "old=base-0,base-[12]"])
    assert [(group.name, len(group.members)) for group in groups] == [("new", 3), ("old", 3)]


def test_a_path_with_an_equals_sign_is_a_path(runs: Path) -> None:
    (runs / "base-0").rename(runs / "dim=32")
    assert [group.name for group in groups_of(["dim=32"])] == ["dim=32"]
    assert [group.name for group in groups_of(["x=dim=32"])] == ["x"]


def test_values_of_groups_and_of_a_pair(runs: Path) -> None:
    result = compared("base-*", "gelu-*")
    base, gelu = result.groups
    assert base.values == A and base.summary.mean == pytest.approx(3.3) and base.summary.std == pytest.approx(0.01)
    assert gelu.seconds == 8.0 and gelu.tokens_per_second == 50.0
    (pair,) = result.pairs
    expected = stats.ttest_ind(B, A, equal_var=False)
    assert pair.test is not None and pair.nats is not None
    assert (pair.test.t, pair.test.df, pair.test.p) == pytest.approx(
        (expected.statistic, expected.df, expected.pvalue), rel=1e-10
    )
    moved = stats.ttest_ind([value + 0.005 for value in B], A, equal_var=False, alternative="less")
    assert pair.improves_by_threshold == pytest.approx(moved.pvalue, rel=1e-10)
    assert pair.spec == {"model.blocks.layers.1.act": ("leaky_relu(x, 0.5) ** 2", "gelu(x)")} or GELU in str(pair.spec)


def test_the_report_states_all_of_it(runs: Path) -> None:
    text = "\n".join(report(compared("base-*", "gelu-*")))
    assert "| base  | 3 |             3.3000 | 0.0100 |     3.3000 |     8.0 |       50 | 0 1 2 |" in text
    assert "  difference -0.0217 bits per byte (better), 95 % interval -0.0424 to -0.0009" in text
    assert "  Welch's t -2.982, df 3.74, two-sided p 0.0442" in text
    assert "  threshold not met: -0.0217 nats per token, one-sided p 0.044 of 0.005 nats less" in text
    assert "gelu(x)" in text


def test_the_threshold_is_met_by_a_clear_difference(runs: Path) -> None:
    for seed in range(3):
        logged_run(runs / f"best-{seed}", 2.0 + 0.01 * seed, [f"train.seed={seed}", "model.dim=64"])
    text = "\n".join(report(compared("base-*", "best-*")))
    assert "  threshold met: -1.2900 nats per token" in text
    assert "model.dim: 32 -> 64" in text


def test_a_group_of_one_has_no_test(runs: Path) -> None:
    (pair,) = compared("base-*", "gelu-seed0").pairs
    assert pair.test is None and pair.reason == "gelu has one run: a test needs two in each group"


def test_more_than_six_groups_are_compared_with_the_first(runs: Path) -> None:
    for i in range(6):
        logged_run(runs / f"wide-{i}", 3.0, [f"model.dim={64 + 64 * i}"])
    result = compared("base-*", *(f"w{i}=wide-{i}" for i in range(6)))
    assert [(pair.first, pair.second) for pair in result.pairs] == [("base", f"w{i}") for i in range(6)]
    assert not any("were tested" in note for note in result.notes)  # a group of one run has no test
    assert (
        "3 pairs were tested, and p is not corrected for their number"
        in compared("base-*", "gelu-*", "low=wide-0,wide-1", "one=wide-2").notes
    )


def test_incomplete_runs_are_left_out_and_named(runs: Path) -> None:
    logged_run(runs / "base-9", None, ["train.seed=9"])
    result = compared("base-*", "gelu-*")
    assert result.groups[0].seeds == (0, 1, 2)
    assert result.notes == ("base-9 is left out: pre-empted by SIGTERM",)
    with pytest.raises(CompareError, match="late has no complete run: pre-empted by SIGTERM"):
        compared("late=base-9", "gelu-*")
    with pytest.raises(CompareError, match="no run is complete"):
        compared("base-9")


def test_a_run_whose_final_validation_is_damaged_is_left_out(runs: Path) -> None:
    """Its earlier validation is not the final result."""
    log = runs / "base-0/log.jsonl"
    lines = log.read_text().splitlines()
    early = [json.dumps({**json.loads(line), "step": 2}) for line in lines[-3:-1]]
    log.write_text("\n".join([*lines[:-3], *early, lines[-3], lines[-2][:60], lines[-1]]))
    result = compared("base-*", "gelu-*")
    assert result.groups[0].values == A[1:]
    assert result.notes[0] == "base-0 is left out: the final validation is missing or damaged"


def test_records_that_lack_fields_are_skipped_with_a_note(runs: Path) -> None:
    with (runs / "base-0/log.jsonl").open("a") as log:
        log.write('{"event": "validation", "step": 4, "weights": "average"}\n{"event": "step", "step": 5}\n')
    result = compared("base-*", "gelu-*")
    assert result.groups[0].values[0] == pytest.approx(A[0])
    assert result.notes == ("base-0/log.jsonl: 2 lines are not valid records; an interrupted run may leave one",)


def test_doubtful_samples_are_named(runs: Path) -> None:
    logged_run(runs / "base-twice", 3.305, ["train.seed=2"])
    notes = compared("all=base-*,gelu-seed0").notes
    assert any("differ in model.blocks.layers.1.act, and not only in the seed" in note for note in notes)
    assert any("2 runs have the same spec and the seed 2; they are not independent" in note for note in notes)


def test_other_validation_data_are_refused(runs: Path) -> None:
    logged_run(runs / "other", 3.0, ["model.dim=64"], val="c" * 64, data="elsewhere")
    with pytest.raises(
        CompareError, match=r"the validation split of base-0 \(stdlib\) and that of other \(elsewhere\) differ"
    ):
        compared("base-*", "other")


def test_other_numbers_of_scored_tokens_are_refused(runs: Path) -> None:
    logged_run(runs / "part", 3.0, ["model.dim=64"], tokens=500)
    with pytest.raises(CompareError, match="base-0 was scored on 1,000 tokens, but part on 500") as caught:
        compared("base-*", "part")
    assert caught.value.hint == "train both with the same `train.validate_tokens`"  # recorded scores do not help


def test_other_tokenizers_are_compared_in_bits_per_byte_only(runs: Path) -> None:
    """The same text of the same size in other tokens: half as many, of twice the loss."""
    words = ["train.data.tokenizer=words.model"]
    logged_run(runs / "words", 6.5, words, val="c" * 64, tokens=500, bits=0.5)
    result = compared("base-*", "words")
    assert result.metric.name == "bpb" and result.groups[1].nats is None and result.pairs[0].nats is None
    assert any("the tokenizers differ (bytes, words.model): only bits per byte" in note for note in result.notes)
    logged_run(runs / "shorter", 6.5, words, val="c" * 64, tokens=400, bits=0.5)
    with pytest.raises(CompareError, match="are not known to be the same text"):
        compared("base-*", "shorter")


def test_older_runs_without_digests(runs: Path) -> None:
    logged_run(runs / "old", 3.0, ["model.dim=64"], val=None)
    assert any("states no digest of its data" in note for note in compared("base-*", "old").notes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "nothing: no such run"),
        (["non*"], "non*: no such run"),
        (["a=base-*", "a=gelu-*"], "two groups have the name a"),
        (["a=base-*", "base-0"], "base-0 is named twice, in a and base"),
        (["empty"], "empty: is not a run"),
    ],
)
def test_what_a_word_must_name(runs: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "empty").mkdir()
    assert run(["compare", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_command_prints_json_and_draws(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "base=base-*", "gelu-*", "--json", "--picture", "curves.png"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [group["name"] for group in facts["groups"]] == ["base", "gelu"]
    assert facts["threshold"] == {"nats": 0.005, "p": 0.01}
    assert facts["pairs"][0]["test"]["df"] == pytest.approx(3.74, abs=0.01)
    assert (runs / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specc.runtime.pictures.find_spec", lambda name: None)
    assert run(["compare", "base-*", "--picture", "curves.png"]) == 3
    assert "pip install 'specc[bench]'" in capsys.readouterr().err


def score(
    folder: Path, acc: float, *, step: int = 4, model: str = "run", file: str = "cloze.jsonl", sha: str = "c"
) -> None:
    """Records a result of `specc eval` in a run."""
    measures = {"acc": {"value": acc, "standard_error": 0.03}, "perplexity": {"value": 9.0, "standard_error": None}}
    facts = {"task": "cloze", "file": file, "sha256": sha * 64, "examples": 10, "measures": measures}
    record_evaluation(folder, {**facts, "model": model, "step": step})


def test_recorded_evaluations_are_compared(runs: Path) -> None:
    for seed, acc in enumerate((0.25, 0.5, 0.75)):
        score(runs / f"base-{seed}", acc)
    score(runs / "gelu-seed0", 0.5)
    score(runs / "gelu-seed1", 0.5, step=3)
    score(runs / "gelu-seed2", 0.125, model="quantized")
    result = compared("base-*", "gelu-*")
    quantized, trained = result.evaluations
    assert (trained.file, trained.task, trained.model) == ("cloze.jsonl", "cloze", "run")
    assert quantized.model == "quantized" and quantized.groups.keys() == {"gelu"}
    base, gelu = trained.groups["base"]["acc"], trained.groups["gelu"]["acc"]
    assert (base.summary.n, base.summary.mean, base.summary.std) == (3, 0.5, 0.25)
    assert base.spread == 0.25 and base.error == pytest.approx(0.03)
    assert (gelu.summary.n, gelu.summary.mean, gelu.spread) == (1, 0.5, 0.03)
    assert trained.groups["gelu"]["perplexity"].spread is None
    text = "\n".join(report(result))
    assert "cloze.jsonl (cloze, trained weights)" in text and "cloze.jsonl (cloze, quantized weights)" in text
    assert "| base  | 3 | 0.5000 ± 0.2500 | 9.0000 ± 0.0000 |" in text
    assert "| gelu  | 1 | 0.5000 ± 0.0300 |          9.0000 |" in text
    assert "note: gelu-seed1: the result of cloze.jsonl at step 3 is left out; score it again" in text
    assert "note: cloze.jsonl (cloze, trained weights): 1 of 3 runs of gelu have a result" in text
    assert result.facts()["evaluations"][1]["groups"]["base"]["acc"]["summary"]["mean"] == 0.5


def test_evaluations_of_other_examples_are_not_mixed(runs: Path) -> None:
    score(runs / "base-0", 0.25)
    score(runs / "gelu-seed0", 0.75, file="other.jsonl", sha="d")
    score(runs / "gelu-seed1", 0.75, sha="e")
    assert [(e.file, list(e.groups)) for e in compared("base-*", "gelu-*").evaluations] == [
        ("cloze.jsonl, sha256 cccccccc", ["base"]),
        ("cloze.jsonl, sha256 eeeeeeee", ["gelu"]),
        ("other.jsonl", ["gelu"]),
    ]
    for file in ("moved.jsonl", "other.jsonl"):
        score(runs / "base-0", 0.75, file=file, sha="d")
    groups = compared("base-*", "gelu-*").evaluations[-1].groups
    assert {name: measures["acc"].summary.n for name, measures in groups.items()} == {"base": 1, "gelu": 1}


@pytest.mark.parametrize(
    "change", ["{", "[]", {"file": None}, {"sha256": 7}, {"step": "4"}, {"measures": None}, {"measures": {"acc": None}},
               {"measures": {"acc": {"value": None}}}, {"measures": {"acc": {"value": 1, "standard_error": "x"}}}],
)  # fmt: skip
def test_damaged_evaluations_are_named(runs: Path, change: str | dict[str, Any]) -> None:
    for name in ("base-0", "gelu-seed0"):
        score(runs / name, 0.5)
    (path,) = Path("base-0/evaluations").glob("*")
    text = change if isinstance(change, str) else json.dumps({**json.loads(path.read_text()), **change})
    path.write_text(text)
    result = compared("base-0", "gelu-seed0")
    note = f"{path}: is not a valid result of `specc eval`; score the model again"
    assert result.notes[0] == note and [list(e.groups) for e in result.evaluations] == [["gelu"]]
    assert RunFacts.read(Path("base-0")).problems == (note,)


def test_the_picture_draws_the_first_measure_of_each_evaluation(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr("specc.runtime.compare.picture.png", lambda figure: figures.append(figure) or b"")
    score(runs / "base-0", 0.25)
    score(runs / "base-0", 0.5, model="quantized")
    comparison, groups = compare(groups_of(["base-*", "gelu-*"]))
    comparison_picture(groups, {}, comparison.evaluations)
    (figure,) = figures
    drawn = {axes.get_title("left"): axes for axes in figure.axes}
    assert list(drawn)[:2] == ["loss over tokens", "loss over time"] and len(drawn) == 4
    axes = drawn["cloze.jsonl (cloze, trained weights)"]
    assert axes.get_xlabel() == "acc" and [tick.get_text() for tick in axes.get_yticklabels()] == ["base", "gelu"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.containers[0].lines[:1]] == [
        ([0.25], [0])
    ]
