"""Pairs of specs, each labelled with what stops old checkpoints or artifacts from loading."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from specc.cli.app import run
from specc.compiler.compare.breaking import breaking_changes, interface_of

BASE = (Path(__file__).parents[2] / "errors/decoder.yaml").read_text()
VERSION_1 = BASE.replace("spec_version: 2", "spec_version: 1")

# change of the base -> the subject and the change of each finding
PAIRS: dict[str, tuple[tuple[tuple[str, str], ...], list[str]]] = {
    "nothing": ((), []),
    "comment": ((("name: tiny", "name: tiny  # the smallest"),), []),
    "learning rate": ((("lr: 0.001", "lr: 0.01"),), []),
    "activation": ((("relu(x) ** 2", "gelu(x)"),), []),
    "softcap": ((("softcap: 30", "softcap: 20"),), []),
    "context": ((("context: 32", "context: 64"),), []),
    "rope": ((("dims: 8", "dims: 16"),), []),
    "steps": ((("steps: 10", "steps: 20"),), []),
    "name": ((("name: tiny", "name: other"),), []),
    "heads of the same width": ((("heads: 4\n        kv_heads: 2", "heads: 8\n        kv_heads: 4"),), []),
    "target": ((("[cpu]", "[cpu, sm90]"),), []),
    "kv heads": (
        (("kv_heads: 2", "kv_heads: 4"),),
        [
            "blocks.*.attention.k (2 parameters) changes its shape from [32, 64] to [64, 64]",
            "blocks.*.attention.v (2 parameters) changes its shape from [32, 64] to [64, 64]",
        ],
    ),
    "width of the mlp": (
        (("ratio: 4", "ratio: 3"),),
        [
            "blocks.*.mlp.down (2 parameters) changes its shape from [64, 256] to [64, 192]",
            "blocks.*.mlp.up (2 parameters) changes its shape from [256, 64] to [192, 64]",
        ],
    ),
    "vocabulary": ((("vocab: 257", "vocab: 300"),), ["embed.token changes its shape from [257, 64] to [300, 64]"]),
    "fewer layers": (
        (("count: 2", "count: 1"),),
        [f"blocks.1.{name} is removed" for name in (
            "attention.k", "attention.out", "attention.q", "attention.v", "mlp.down", "mlp.up")],
    ),
    "one more layer": ((("** 2\n", "** 2\n      - {kind: mlp, name: more, ratio: 1, act: relu(x)}\n"),), None),
    "untied head": ((("{softcap: 30}", "{softcap: 30, tied: false}"),), ["head.logits is new"]),
    "renamed layer": (
        (("      - kind: mlp", "      - name: feed\n        kind: mlp"),),
        ["blocks.*.mlp.down (2 parameters) is removed", "blocks.*.mlp.up (2 parameters) is removed",
         "blocks.*.feed.down (2 parameters) is new", "blocks.*.feed.up (2 parameters) is new"],
    ),
    "storage of one table": (
        (("dtype: f16", "dtype: f32"),),
        ["embed.token is stored as f32, not as f16"],
    ),
    "bits": ((("bits: 8", "bits: 6"),), None),
    "tokenizer": (
        (("  tokens_per_step", "  data: {tokenizer: words.json}\n  tokens_per_step"),),
        ["train.data.tokenizer changes the ids of tokens: it was bytes, and is words.json"],
    ),
}  # fmt: skip


def changed(changes: tuple[tuple[str, str], ...]) -> str:
    text = BASE
    for old, new in changes:
        assert text.count(old) >= 1, old
        text = text.replace(old, new, 1)
    return text


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_are_classified(pair: str) -> None:
    changes, expected = PAIRS[pair]
    findings = breaking_changes(interface_of(BASE, "old.yaml"), interface_of(changed(changes), "new.yaml"))
    messages = [finding.message for finding in findings]
    if expected is None:  # of many parameters
        word = {"bits": "is stored as int6, not as int8", "one more layer": "is new"}[pair]
        assert messages and all(message.endswith(word) for message in messages)
    else:
        assert messages == expected
    for finding in findings:
        assert finding.code == "F008" and finding.file == "new.yaml" and finding.hint
        assert 1 <= finding.mark.line <= len(changed(changes).splitlines())


def test_there_are_enough_pairs_of_both_kinds() -> None:
    assert len(PAIRS) >= 20 and 8 <= sum(expected == [] for _, expected in PAIRS.values()) <= 12


def test_a_spec_of_an_old_version_is_compared() -> None:
    assert breaking_changes(interface_of(VERSION_1, "old.yaml"), interface_of(BASE, "new.yaml")) == ()


def test_a_finding_is_at_the_line_that_causes_it() -> None:
    text = BASE.replace("ratio: 4", "ratio: 3")
    (first, _) = breaking_changes(interface_of(BASE, "old.yaml"), interface_of(text, "new.yaml"))
    assert text.splitlines()[first.mark.line - 1].strip() == "- kind: mlp"


def test_against_a_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").mkdir()
    for name in ("tiny", "gone"):
        (tmp_path / f"specs/{name}.yaml").write_text(BASE.replace("name: tiny", f"name: {name}"))
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "one")):
        subprocess.run(["git", *author, *words], check=True)
    assert run(["breaking", "--against", "HEAD"]) == 0
    assert capsys.readouterr().out == "2 specs: no breaking change since HEAD\n"
    (tmp_path / "specs/tiny.yaml").write_text(changed(PAIRS["kv heads"][0]))
    (tmp_path / "specs/gone.yaml").rename(tmp_path / "specs/new.yaml")
    assert run(["breaking", "--against", "HEAD", "--format", "json"]) == 1
    findings = json.loads(capsys.readouterr().out)
    assert [(finding["file"], finding["code"]) for finding in findings] == [
        ("specs/gone.yaml", "F008"),
        ("specs/tiny.yaml", "F008"),
        ("specs/tiny.yaml", "F008"),
    ]
    assert run(["breaking", "specs/new.yaml", "--against", "HEAD"]) == 0
    assert run(["breaking", "--against", "no-such-branch"]) == 2
    assert "no-such-branch is neither a file nor a revision" in capsys.readouterr().err
    assert run(["breaking", "specs/tinny.yaml", "--against", "HEAD"]) == 2
    assert "specs/tinny.yaml:1:1: S001 the file does not exist" in capsys.readouterr().err
    shutil.rmtree("specs")
    removed = "specs/{}.yaml:1: F008 the spec was removed since HEAD\n"
    assert run(["breaking", "specs/gone.yaml", "--against", "HEAD"]) == 1
    assert capsys.readouterr().out == removed.format("gone")
    assert run(["breaking", "--against", "HEAD"]) == 1
    assert capsys.readouterr().out == removed.format("gone") + removed.format("tiny")
    shutil.rmtree(".git")
    assert run(["breaking", "specs/tiny.yaml", "--against", "main"]) == 2
    assert "specs/tiny.yaml is not in a git repository, and main is not a file" in capsys.readouterr().err
