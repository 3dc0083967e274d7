"""Sweep files: the runs that they describe, and what is refused before the first run, at its place in the file."""

from pathlib import Path

import pytest

from specc.compiler.errors import SpeccError, SpecError, render
from specc.compiler.spec.check import load
from specc.runtime.sweep.plan import digest_of, read_sweep

ROOT = Path(__file__).parents[3]
SPEC = ROOT / "specs/gpt_mini.yaml"


def sweep_file(folder: Path, text: str) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(f"spec: {SPEC}\ntarget: cpu\n{text}")
    return path


def refused(folder: Path, text: str) -> str:
    with pytest.raises(SpecError) as caught:
        read_sweep(sweep_file(folder, text))
    return render(caught.value).replace(f"{folder}/", "")


def test_every_entry_meets_every_point_of_the_grid(tmp_path: Path) -> None:
    text = """\
set: [train.steps=200]
seeds: [1, 2]
grid:
  model.dim: [64, 128]
  train.optimizers.0.lr: [0.01, 0.02]
settings:
  - name: relu(x) ** 2
  - name: gelu
    set: ['model.blocks.layers.1.act=gelu(x)']
    seeds: [7]
"""
    sweep = read_sweep(sweep_file(tmp_path, text))
    names = [run.name for run in sweep.runs]
    assert len(names) == len(set(names)) == 2 * 4 + 4
    assert names[:3] == [
        "relu_x_2_dim=64_lr=0.01-seed1",
        "relu_x_2_dim=64_lr=0.01-seed2",
        "relu_x_2_dim=64_lr=0.02-seed1",
    ]
    assert sweep.settings[0] == "relu(x) ** 2, dim=64, lr=0.01"
    last = sweep.runs[-1]
    assert last.overrides == (
        "train.steps=200",
        "model.blocks.layers.1.act=gelu(x)",
        "model.dim=128",
        "train.optimizers.0.lr=0.02",
        "train.seed=7",
    )
    assert last.spec_digest == digest_of(load(SPEC, last.overrides)[0])
    assert sweep.values[last.setting] == {"model.dim": 128, "train.optimizers.0.lr": 0.02}


def test_values_of_a_grid_are_written_as_yaml(tmp_path: Path) -> None:
    """Texts, mappings and null reach the spec as they stand in the file."""
    text = """\
grid:
  model.blocks.layers.1.act: [relu(x) ** 2, gelu(x)]
  train.clip_norm: [null, 1.0]
  train.schedule: [{warmdown_steps: 10}, {warmup_steps: 5, shape: cosine}]
"""
    sweep = read_sweep(sweep_file(tmp_path, text))
    specs = [load(SPEC, run.overrides)[0] for run in sweep.runs]
    assert len({run.spec_digest for run in sweep.runs}) == 8
    assert [spec.train.clip_norm for spec in specs] == [None, None, 1.0, 1.0] * 2
    assert sweep.runs[0].overrides[:2] == ("model.blocks.layers.1.act=relu(x) ** 2", "train.clip_norm=null")
    assert sweep.runs[0].seed == specs[0].train.seed


def test_names_that_would_share_a_folder(tmp_path: Path) -> None:
    text = "settings: [{name: lr+, set: [train.optimizers.0.lr=0.5]}, {name: LR+}, {name: 'a b'}]\n"
    names = [run.name for run in read_sweep(sweep_file(tmp_path, text.replace("{name: 'a b'}", ""))).runs]
    assert len({name.lower() for name in names}) == 2
    assert names[0].startswith("lr+_") and names[1].startswith("LR+_")


def test_long_values_with_equal_starts_are_settings_of_their_own(tmp_path: Path) -> None:
    mapping = "{warmup_fraction: 0.1, warmdown_fraction: 0.5, floor: %s}"
    text = f"grid: {{train.schedule: [{mapping % 0.05}, {mapping % 0.5}, {{warmup_steps: 5}}]}}\n"
    first, second, short = read_sweep(sweep_file(tmp_path, text)).runs
    assert (
        first.setting == 'schedule={"warmup_fraction": 0.1, "warmdown_fr...'
        and second.setting[:-8] == first.setting + " "
    )
    assert first.setting != second.setting and first.name != second.name
    assert short.setting == 'schedule={"warmup_steps": 5}'
    (alone,) = read_sweep(sweep_file(tmp_path, f"grid: {{train.schedule: [{mapping % 0.05}]}}\n")).runs
    assert (alone.setting, alone.name) == (first.setting, first.name)  # a value that is added changes no name


def test_a_problem_of_an_override_is_shown_in_the_sweep_file(tmp_path: Path) -> None:
    text = """\
set: ["model.contxt=64"]
settings:
  - {name: a}
  - name: b
    set: ['train.optimizers.9.lr=3']
"""
    message = refused(tmp_path, text)
    assert (
        message
        == """\
sweep.yaml:3:14: S101 `contxt` is not a valid key of `model` (in the setting `a`)
  |
3 | set: ["model.contxt=64"]
  |              ^^^^^^
  = help: did you mean `context`?

sweep.yaml:7:29: S014 `train.optimizers` has no item `9` (in the setting `b`)
  |
7 |     set: ['train.optimizers.9.lr=3']
  |                             ^^^^
  = help: it has 3 items, counted from 0; `+` appends

2 errors"""
    )


def test_a_problem_of_a_value_of_the_grid_is_shown_at_the_value(tmp_path: Path) -> None:
    message = refused(tmp_path, "grid:\n  model.dim: [64, 66, 128]\n  model.vocabb: [1]\n")
    assert "sweep.yaml:5:3: S101 `vocabb` is not a valid key of `model` (in every setting)" in message
    message = refused(tmp_path, "grid:\n  model.dim: [64, -66, 128]\n")
    assert message.startswith("sweep.yaml:4:19: S104 `dim` must be more than 0, not -66 (in the setting `dim=-66`)")


def test_a_problem_of_the_whole_spec_names_the_settings(tmp_path: Path) -> None:
    message = refused(tmp_path, "grid: {train.steps: [20, 200, 30]}\n")
    assert message.startswith(f"{SPEC}:")
    assert "(in the setting `steps=20`)" in message and "(in the setting `steps=30`)" in message
    assert "`steps=200`" not in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seds: [1]\n", "sweep.yaml:3:1: S101 `seds` is not a valid key of the sweep"),
        ("seeds: []\n", "sweep.yaml:3:1: S104 `seeds` must be a list of length at least 1"),
        ("seeds: [1, 1]\n", "sweep.yaml:3:1: S502 the seed 1 is listed 2 times"),
        ("seeds: [one]\n", "sweep.yaml:3:9: S103 `seeds.0` must be a whole number, not the text `one`"),
        ("grid: {train.seed: [1, 2]}\n", "sweep.yaml:3:8: S502 `train.seed` is not a setting"),
        ("seeds: [1]\nset: [train.seed=3]\n", "sweep.yaml:4:7: S502 `train.seed` is set here and by `seeds`"),
        ("settings: [{name: a}, {name: a}]\n", "sweep.yaml:3:30: S501 two entries of settings have the name `a`"),
        ("settings: [{name: a}, {name: b}]\n", "S501 the settings `a` and `b` have the same spec"),
        (
            "grid: {model.dim: [64, 64]}\n",
            "sweep.yaml:3:24: S501 the settings `dim=64` and `dim=64` have the same spec",
        ),
        ("quantize: [{name: x, of: y}]\n", "sweep.yaml:3:26: S503 `x` quantizes `y`, which is not a setting"),
        ("quantize: [{name: x, set: [model.dim=64]}]\n", "S503 `x` may change only `quant`"),
        (
            "quantize: [{name: x, set: [quant.defalt=1]}]\n",
            "sweep.yaml:3:34: S101 `defalt` is not a valid key of `quant`",
        ),
        (
            "quantize: [{name: x, set: ['quant.default={scheme: round, bits: 6}']}]\n",
            "sweep.yaml:3:12: S311 `promote` changes nothing",
        ),
        ("grid: {model.dim: []}\n", "sweep.yaml:3:8: S104 `model.dim` must be a list of length at least 1"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text)


def test_the_target_and_the_spec_must_exist(tmp_path: Path) -> None:
    path = sweep_file(tmp_path, "")
    with pytest.raises(SpecError, match="the spec does not list the target `sm7`"):
        read_sweep(path, target="sm7")
    path.write_text("set: []\nspec: sweeq.yaml\n")
    with pytest.raises(SpecError, match=r"sweep.yaml:2:7: S001 `sweeq.yaml`: the file does not exist") as caught:
        read_sweep(path)
    assert "did you mean" not in str(caught.value)


def test_a_spec_is_no_sweep_file() -> None:
    with pytest.raises(SpeccError, match="is a spec, not a sweep file"):
        read_sweep(SPEC)


def test_a_spec_beside_the_sweep_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "near.yaml").write_text(SPEC.read_text())
    (tmp_path / "sweep.yaml").write_text("spec: near.yaml\n")
    assert read_sweep(tmp_path / "sweep.yaml").spec == tmp_path / "near.yaml"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_sweeps_of_this_repository_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sweep = read_sweep(path)
    assert len(sweep.settings) > 1
