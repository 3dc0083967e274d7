"""`specc diff`: a summary first, then the texts, the plans and the kernels paired by node."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from specc.compiler.diff import compare
from specc.compiler.errors import SpecError

SPECS = Path(__file__).parents[2] / "specs"
GOLF = (SPECS / "gpt_mlp35_base.yaml").read_text()


def compared(tmp_path: Path, *changes: tuple[str, str]) -> tuple[tuple[str, ...], str]:
    text = GOLF
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path = tmp_path / "other.yaml"
    path.write_text(text)
    shutil.copy(SPECS / "gpt_mlp35_base.lock.json", tmp_path)
    return compare(SPECS / "gpt_mlp35_base.yaml", path)


def heads(text: str) -> list[tuple[str, str]]:
    """What is compared with what, in order."""
    lines = text.splitlines()
    return [(a[4:], b[4:]) for a, b in pairwise(lines) if a.startswith("--- ") and b.startswith("+++ ")]


def test_equal_specs_have_no_diff(tmp_path: Path) -> None:
    summary, text = compared(tmp_path)
    assert text == ""
    assert summary[-1] == "changed      nothing"


def test_kernels_are_paired_by_node(tmp_path: Path) -> None:
    summary, text = compared(tmp_path, ("leaky_relu(x, 0.5) ** 2", "relu(x) ** 2"))
    assert heads(text) == [
        (str(SPECS / "gpt_mlp35_base.yaml"), str(tmp_path / "other.yaml")),
        ("a/PLAN.md", "b/PLAN.md"),
        ("a/cpu/dgrad_mul__n1792_k512.py", "b/cpu/dgrad_mul_sqrt__n1792_k512.py"),
        ("a/cpu/linear_leaky_relu2__n1792_k512.py", "b/cpu/linear_relu2__n1792_k512.py"),
        ("a/sm90/dgrad_mul__n1792_k512.cu", "b/sm90/dgrad_mul_sqrt__n1792_k512.cu"),
        ("a/sm90/dgrad_mul__n1792_k512.py", "b/sm90/dgrad_mul_sqrt__n1792_k512.py"),
        ("a/sm90/linear_leaky_relu2__n1792_k512.cu", "b/sm90/linear_relu2__n1792_k512.cu"),
        ("a/sm90/linear_leaky_relu2__n1792_k512.py", "b/sm90/linear_relu2__n1792_k512.py"),
        ("a/cpu/model.py", "b/cpu/model.py"),
        ("a/sm90/model.py", "b/sm90/model.py"),
    ]
    was = "-    slope = torch.where(x > 0, 2.0 * x, 0.5 * x)\n-    return 0.5 * slope * x, slope\n"
    assert f"{was}+    return F.relu(x) ** 2\n" in text
    assert summary[:4] == (
        "gpt_mlp35_base -> gpt_mlp35_base",
        "parameters   29,374,040 -> 29,374,040 (+0)",
        summary[2],
        "changed      PLAN.md, cpu/model.py, sm90/model.py",
    )
    assert summary[4].startswith("replaced     cpu/dgrad_mul__n1792_k512.py -> cpu/dgrad_mul_sqrt__n1792_k512.py, ")
    assert len(summary) == 5


def test_a_kernel_in_another_language_is_removed_and_added(tmp_path: Path) -> None:
    lock = json.loads((SPECS / "gpt_mlp35_base.lock.json").read_text())
    entry = lock["targets"]["sm90"]["kernels"]["linear_leaky_relu2__n1792_k512"]
    tile = {"m": 128, "n": 128, "k": 64, "warps": 4, "stages": 3, "resident": 2}
    entry |= {"kernel": "linear_triton", "tile": tile}
    path = tmp_path / "other.yaml"
    path.write_text(GOLF)
    (tmp_path / "gpt_mlp35_base.lock.json").write_text(json.dumps(lock))
    summary, text = compare(SPECS / "gpt_mlp35_base.yaml", path)
    words = {line.partition(" ")[0]: line for line in summary}
    assert words["removed"] == "removed      sm90/linear_leaky_relu2__n1792_k512.cu"
    assert words["changed"] == "changed      PLAN.md, sm90/linear_leaky_relu2__n1792_k512.py"
    assert ("a/sm90/linear_leaky_relu2__n1792_k512.cu", "/dev/null") in heads(text)


def test_a_gate_adds_kernels_and_replaces_others(tmp_path: Path) -> None:
    summary, text = compared(tmp_path, ("leaky_relu(x, 0.5) ** 2", "silu(gate) * x"))
    words = {line.partition(" ")[0]: line for line in summary}
    assert "sm90/linear_leaky_relu2__n1792_k512.cu -> sm90/linear_silu_mul_pre__n1792_k512.cu" in words["replaced"]
    assert "sm90/dgrad_add__n512_k1792.cu" in words["added"]
    assert ("/dev/null", "b/sm90/dgrad_add__n512_k1792.cu") in heads(text)
    assert words["parameters"] == f"parameters   29,374,040 -> {29_374_040 + 11 * 1792 * 512:,} (+{11 * 1792 * 512:,})"


def test_a_learning_rate_is_in_the_spec_diff_alone(tmp_path: Path) -> None:
    summary, text = compared(tmp_path, ("lr: 0.035", "lr: 0.034"))
    assert heads(text) == [(str(SPECS / "gpt_mlp35_base.yaml"), str(tmp_path / "other.yaml"))]
    assert summary[-1] == "changed      nothing"


def test_another_width_renames_every_kernel_and_adds_none(tmp_path: Path) -> None:
    summary, _ = compared(tmp_path, ("ratio: 3.5", "ratio: 4"))
    words = ["gpt_mlp35_base", "parameters", "FLOP", "changed", "replaced"]
    assert [line.partition(" ")[0] for line in summary] == words
    assert summary[-1].count(" -> ") == 6


def test_a_target_less_is_removed(tmp_path: Path) -> None:
    summary, _ = compared(tmp_path, ("targets: [sm90, cpu]", "targets: [cpu]"))
    assert "sm90/model.py" in summary[-1]
    assert summary[-1].startswith("removed ")


def test_a_bad_spec_is_told_as_ever(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="S210"):
        compared(tmp_path, ("heads: 8", "heads: 7"))
