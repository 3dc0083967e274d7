"""`specc render`: every value with its origin, and a text that is the same spec."""

import re
from pathlib import Path

import pytest

from specc.compiler.build import canonical, compile_spec
from specc.compiler.spec.check import load
from specc.compiler.spec.resolved import resolved_text

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
      - {kind: mlp, ratio: 4, act: 'relu(x) ** 2'}
train:
  tokens_per_step: 1024
  steps: 10
  optimizers: [{kind: adamw, match: "*", lr: 0.001}]
"""


def rendered(origin: Path | str, *overrides: str) -> str:
    spec, source = load(origin, overrides)
    return resolved_text(spec, source, overrides)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_rendered_spec_is_the_same_spec(path: Path) -> None:
    text = rendered(path)
    spec, source = load(text)
    assert canonical(spec) == canonical(load(path)[0])
    again = resolved_text(spec, source)
    strip = re.compile(r" +# .*$", re.MULTILINE)
    assert strip.sub("", again).splitlines()[1:] == strip.sub("", text).splitlines()[1:]


@pytest.mark.parametrize("name", ["gpt_mini", "poly_attn", "gpt_moe"])
@pytest.mark.parametrize("overrides", [(), ("train.seed=7", "model.context=64")], ids=["plain", "set"])
def test_a_build_of_a_rendered_spec_has_the_same_bytes(name: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    path = ROOT / f"specs/{name}.yaml"
    if overrides and name != "gpt_mini":
        overrides = overrides[:1]
    (tmp_path / "specs").mkdir()
    copy = tmp_path / "specs" / path.name
    copy.write_text(rendered(path, *overrides))
    for lock in path.parent.glob(f"{name}.lock.json"):
        (copy.parent / lock.name).write_bytes(lock.read_bytes())
    assert compile_spec(copy).files == compile_spec(path, overrides).files


def test_each_line_states_its_origin(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(BASE)
    lines = rendered(path, "train.steps=7", "model.blocks.layers.1.ratio=2").splitlines()
    assert (
        lines[0]
        == f'# {path} --set "train.steps=7" --set "model.blocks.layers.1.ratio=2", with every value that applies'
    )
    origins = {line.split("  #")[0].strip(): line.partition("  # ")[2] for line in lines[1:] if "  # " in line}
    assert origins["vocab: 257"] == f"{path}:6"
    assert origins["targets: [cpu]"] == f"{path}:3"
    assert origins["- kind: mlp"] == f"{path}:15"
    assert origins["steps: 7"] == "--set train.steps"
    assert origins["ratio: 2.0"] == "--set model.blocks.layers.1.ratio"
    assert origins["weight_decay: 0.0"] == "default"
    without = [line for line in lines[1:] if "  # " not in line]
    assert all(line.rstrip().endswith(":") for line in without), "only lines without a value have no origin"
