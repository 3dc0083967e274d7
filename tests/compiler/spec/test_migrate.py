"""Specs of version 1: rewritten with their comments, read from runs and artifacts, refused where they are built."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tiny_models import ATTENTION, MLP, TRAIN

from specc.cli.app import specc
from specc.compiler import pipeline
from specc.compiler.build import canonical, spec_of
from specc.compiler.changing_values import rate_at
from specc.compiler.errors import SpecError
from specc.compiler.spec.check import load
from specc.compiler.spec.migrate import condition_of, migrated_text, upgraded
from specc.runtime.storage.run_directory import Run

OLD = """\
# A model with most options of version 1.
spec_version: 1
name: old
targets: [cpu]
model:
  kind: decoder
  vocab: 11
  dim: 8
  context: 12
  embed: [{kind: token}]
  blocks:
    count: 6
    skips: {kind: unet, gated: true}     # from the first half
    mix: {kind: embedded}
    parallel: [4]
    layers:
      - {kind: attention, heads: 2, values: {dim: 3, layers: [5]}, residual: learned}
      - {kind: mlp, hidden: 12, act: relu(x), residual: 1/sqrt(2 * layers)}   # small
train:
  data: {tokenizer: eleven.model}
  tokens_per_step: 24
  micro_batch: 2
  steps: 2
  optimizers: [{kind: adamw, match: "*", lr: 0.01}]
"""


def test_comments_of_removed_keys_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    text = OLD.replace(
        "{kind: unet, gated: true} ", "\n      kind: unet  # across\n      # learned\n      gated: true "
    )
    text = text.replace(
        "- {kind: attention, heads: 2,", "- kind: attention\n        heads: 2\n        window: 8  # short\n        #"
    )
    path.write_text(text)
    new = migrated_text(path)
    assert new is not None
    for comment in ("# across", "# learned", "# from the first half", "# short", "# small"):
        assert new.count(comment) == 1, comment
    path.write_text(new)
    load(path)


def test_a_file_is_rewritten_with_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(OLD)
    with pytest.raises(SpecError, match="specc migrate"):
        load(path)
    check = CliRunner().invoke(specc, ["migrate", str(path), "--check"], standalone_mode=False)
    assert check.return_value == 1 and path.read_text() == OLD
    path.chmod(0o600)
    link = tmp_path / "link.yaml"
    link.symlink_to("old.yaml")
    assert CliRunner().invoke(specc, ["migrate", str(link)], standalone_mode=False).return_value == 0
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    for comment in ("# A model with most options of version 1.", "# from the first half", "# small"):
        assert comment in text
    assert "  embed: [{kind: token}]\n" in text  # a mapping of one key keeps its braces
    assert migrated_text(path) is None
    spec, _ = load(path)
    names = {param.name: param.shape for param in pipeline.lower(spec, "cpu").params}
    assert names["blocks.3.skip.scale"] == names["blocks.0.mix.stream"] == names["blocks.2.attention.residual"] == (8,)
    assert "blocks.2.skip.scale" not in names and "blocks.3.skip.share" in names
    assert [name for name in names if name.endswith("value_scale")] == ["blocks.5.attention.value_scale"]
    attention = [spec.model.blocks.every[i].layers[0].write for i in (3, 4)]  # type: ignore[attr-defined]
    assert attention == ["x + residual * y", None]


def old_data(**blocks: Any) -> dict[str, Any]:
    stack = {"count": 4, "layers": [dict(ATTENTION), dict(MLP)], **blocks}
    model = {"kind": "decoder", "vocab": 11, "dim": 8, "context": 12, "embed": [{"kind": "token"}], "blocks": stack}
    train = {**TRAIN, "tokens_per_step": 24}
    return {"spec_version": 1, "name": "old", "targets": ["cpu"], "model": model, "fuse": [], "train": train}


def test_an_order_and_modules_stand_for_a_loop_with_skips() -> None:
    data = old_data(loop={"first": 1, "last": 2, "passes": 2, "after": 0.5}, skips={"kind": "unet"})
    blocks = upgraded(data)["model"]["blocks"]
    assert blocks["order"] == {"at": ((0, "0..3"), (0.5, "0..2 1..2 3"))}
    spec = spec_of(json.dumps(data))
    names = {param.name for param in pipeline.lower(spec, "cpu").params}
    assert {f"skips.{i}.scale" for i in range(3)} <= names and "skips.3.scale" not in names
    assert upgraded(upgraded(data)) == upgraded(data) and data["spec_version"] == 1


def test_an_affine_norm_has_a_weight_that_parallel_layers_share() -> None:
    norm = {"kind": "rms", "affine": True}
    data = old_data(norm=dict(norm), parallel=[1])
    data["model"]["norm"] = {"kind": "rms", "affine": False}
    new = upgraded(data)["model"]
    assert new["blocks"]["norm"] == {"kind": "rms", "weight": "w", "shared": True} and new["norm"] == {"kind": "rms"}
    names = {param.name for param in pipeline.lower(spec_of(json.dumps(data)), "cpu").params}
    assert [name for name in names if name.startswith("blocks.1.") and "norm" in name] == [
        "blocks.1.attention.norm_weight"
    ]
    assert "blocks.0.mlp.norm_weight" in names


def test_a_recorded_spec_keeps_its_digest(tmp_path: Path) -> None:
    """Checkpoints of a run of version 1 name the digest of the spec as it was recorded."""
    run = Run(tmp_path / "run", spec_of(json.dumps(old_data(mix={"kind": "embedded"}))), "cpu", "stdlib").create()
    assert Run.open(run.directory).spec_digest == hashlib.sha256(canonical(run.spec).encode()).hexdigest()
    recorded = json.dumps(old_data(mix={"kind": "embedded"}), sort_keys=True, separators=(",", ":"))
    (run.directory / "spec.json").write_text(json.dumps(json.loads(recorded), indent=1))
    again = Run.open(run.directory)
    assert again.spec_digest == hashlib.sha256(recorded.encode()).hexdigest()
    assert again.spec.model == run.spec.model


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((3,), "layer == 3"),
        ((4, 5), "layer >= 4"),
        ((0, 1), "layer <= 1"),
        ((1, 2, 4), "1 <= layer and layer <= 2 or layer == 4"),
    ],
)
def test_conditions_name_the_layers(layers: tuple[int, ...], text: str) -> None:
    assert condition_of(layers, 6) == text


def test_what_changes_during_a_run_becomes_schedules(tmp_path: Path) -> None:
    """Ramps, tapers, teacher forcing and row lengths, with their values at each step, and with their comments."""
    train = """\
  steps: 20
  lengths: [[0, 4], [0.5, 12]]           # short rows first
  optimizers:
    - {kind: muon, match: "*.down", lr: 0.01, momentum: {start: 0.8, end: 0.9, steps: 10}, weight_decay: TAPER}
    - {kind: adamw, match: "*", lr: 0.01, weight_decay: {start: 0.2, end: 0, after: 0}}   # the rest
"""
    path = tmp_path / "old.yaml"
    path.write_text(OLD.partition("  steps: 2\n")[0] + train.replace("TAPER", "{start: 0.2, end: 0.1, after: 0.5}"))
    text = migrated_text(path)
    assert text is not None
    flat = re.sub(" +", " ", text)
    for line in (
        " context: {at: [[0, 4], [0.5, 12]]} # short rows first",
        "momentum: {at: [[0, 0.8], [10, 0.9]], by: step}, weight_decay: {at: [[0, 0.2], [0.5, 0.2], [1, 0.1]]}}",
        "weight_decay: {at: [[0, 0.2], [1, 0]]}} # the rest",
    ):
        assert line in flat
    spec = load(text)[0]
    muon = spec.train.optimizers[0]
    values = [rate_at(muon.momentum, step / 20, step) for step in (0, 5, 10, 20)]  # type: ignore[attr-defined]
    assert values == pytest.approx([0.8, 0.85, 0.9, 0.9])
    decays = [rate_at(muon.weight_decay, step / 20, step) for step in (0, 10, 15, 20)]  # type: ignore[attr-defined]
    assert decays == pytest.approx([0.2, 0.2, 0.15, 0.1])
    assert spec.train.context.at == ((0, 4), (0.5, 12))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([[0, 1.0], [4, 0.5]], {"at": [[0, 1.0], [4, 0.5]], "by": "step"}),
        ({"points": [[0, 1.0], [2, 0.0]], "by": "epoch"}, {"at": [[0, 1.0], [2, 0.0]], "by": "epoch"}),
        (
            {"points": [[0, 1.0], [8, 0.0]], "between": "linear"},
            {"at": [[0, 1.0], [8, 0.0]], "by": "step", "between": "linear"},
        ),
    ],
)
def test_teacher_forcing_of_version_1_becomes_a_schedule(old: object, new: object) -> None:
    data = upgraded({"spec_version": 1, "train": {"teacher_forcing": old}})
    assert json.loads(json.dumps(data["train"]["teacher_forcing"])) == new


def test_tf32_moves_to_precision_with_its_comment(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(
        """\
spec_version: 2
name: old
targets: [cpu]
model:
  kind: decoder
  vocab: 257
  dim: 8
  context: 12
  embed: [{kind: token}]
  blocks: {count: 1, layers: [{kind: mlp, ratio: 1, act: relu(x)}]}
train:
  tokens_per_step: 24
  micro_batch: 2
  steps: 2
  tf32: false      # strict
  optimizers: [{kind: adamw, match: "*", lr: 0.01}]
"""
    )
    with pytest.raises(SpecError, match=r"`train.tf32` is now `train.precision.tf32`"):
        load(path)
    text = migrated_text(path)
    lines = "  steps: 2\n  precision: {tf32: false} # strict\n  optimizers"
    assert text is not None and lines in re.sub(" +#", " #", text)
    path.write_text(text)
    assert load(path)[0].train.precision.tf32 is False and migrated_text(path) is None
    data = json.loads(canonical(load(path)[0]))
    data["train"]["tf32"] = data["train"].pop("precision", None) is None
    assert spec_of(json.dumps(data)).train.precision.tf32 is True
