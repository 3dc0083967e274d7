"""`specc init` copies a spec; with `--small`, as one that trains on a CPU within a minute."""

import re
import shutil
from pathlib import Path

import pytest
from cli_shell import ROOT, Shell, bad
from log_lines import read_log
from run_samples import write_text

from specc.cli import app
from specc.compiler import pipeline
from specc.compiler.spec.check import load

SPECS = sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))


@pytest.mark.parametrize("name", SPECS)
def test_a_small_version_of_each_spec_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert app.run(["init", "first", "--from", str(ROOT / f"specs/{name}.yaml"), "--small"]) == 0
    spec, origin = load(Path("specs/first.yaml"))[0], load(ROOT / f"specs/{name}.yaml")[0]
    assert spec.model.kind == origin.model.kind and spec.targets == ("cpu",) and spec.train.steps == 20
    assert [o.kind for o in spec.train.optimizers] == [o.kind for o in origin.train.optimizers]
    assert sum(param.count for param in pipeline.lower(spec, "cpu").params) < 30e6
    data = ["--data", str(write_text(tmp_path / "text"))] if spec.model.reads == "text" else []
    fewer = ["--steps", "2", "--set", "train.validate_tokens=512"]
    assert app.run(["train", "specs/first.yaml", *data, "--run", "run", *fewer]) == 0
    assert [record["step"] for record in read_log(Path("run/log.jsonl")) if record["event"] == "step"] == [1, 2]


def test_comments_remain_except_those_of_changed_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = ROOT / "specs/modded_gpt.yaml"
    assert app.run(["init", "first", "--from", str(path), "--small"]) == 0
    lines = Path("specs/first.yaml").read_text().splitlines()
    assert lines[0].startswith("# yaml-language-server:") and "modded_gpt with small sizes" in lines[1]
    assert "  vocab: 257" in lines  # 50,257 as a multiple of 128, said a comment
    comments = re.findall(r"#.*", "\n".join(lines[2:]))
    assert comments == [text for text in re.findall(r"#.*", path.read_text())[1:] if "multiple of 128" not in text]


def test_an_editor_finds_the_schema_of_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.run(["init", "first", "--from", str(ROOT / "specs/gpt_mini.yaml")]) == 0
    assert Path("specs/first.yaml").read_text().startswith("# yaml-language-server: $schema=schema.json\n")
    assert app.run(["schema", "--check"]) == 0
    Path("specs/schema.json").write_text("{}")  # an existing one is not replaced
    assert app.run(["init", "second", "--from", "first"]) == 0
    assert Path("specs/schema.json").read_text() == "{}"


def test_examples_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name without a file in specs/ is that of an example; a file in specs/ comes first."""
    monkeypatch.chdir(tmp_path)
    assert app.run(["init", "first", "--from", "gpt_mini"]) == 0
    text = (ROOT / "specs/gpt_mini.yaml").read_text()
    assert Path("specs/first.yaml").read_text() == text.replace("name: gpt_mini\n", "name: first\n")
    Path("specs/gpt_mini.yaml").write_text(text + "# mine\n")
    assert app.run(["init", "second", "--from", "gpt_mini"]) == 0
    assert Path("specs/second.yaml").read_text().endswith("# mine\n")
    capsys.readouterr()
    assert app.run(["init", "third", "--from", "gpt_mimi"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "there is no spec named gpt_mimi" in shown
    assert f"name a file, or one of {', '.join(sorted({'first', 'second', *SPECS}))}" in shown


def test_a_spec_without_a_small_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wide.yaml").write_text((ROOT / "specs/gpt_mini.yaml").read_text() + "eval: {stride: 200}\n")
    assert app.run(["validate", "wide.yaml"]) == 0
    assert app.run(["init", "first", "--from", "wide.yaml", "--small"]) == 2
    message = capsys.readouterr().err
    assert "wide has no small version: a stride of 200 tokens skips some tokens, because the context is 128" in message
    assert not Path("specs").exists()


def test_init_keeps_comments_and_refuses_to_overwrite(here: Path, specc: Shell) -> None:
    shutil.copy(ROOT / "specs/gpt_mlp35_base.yaml", "specs/gpt_mlp35_base.yaml")
    before = Path("specs/gpt_mlp35_base.yaml").read_text()
    for name, origin in (("mine", "gpt_mlp35_base"), ("mine2", "specs/gpt_mlp35_base.yaml")):
        assert specc("init", name, "--from", origin) == 0
        assert specc.out == f"wrote specs/{name}.yaml; next: specc plan specs/{name}.yaml\n"
        assert Path(f"specs/{name}.yaml").read_text() == before.replace("name: gpt_mlp35_base\n", f"name: {name}\n")
    assert specc("init", "mine", "--from", "gpt_mini") == 2
    assert specc("init", "mine", "--from", "gpt_mlp35_base") == 2
    assert "specs/mine.yaml exists already" in specc.err
    for name in ("a/b", "null", "true", "false"):  # YAML reads the last three as other types
        assert specc("init", name, "--from", "gpt_mlp35_base") == 2
        assert f"U002 {name!r} is not a model name" in specc.err
    assert sorted(path.name for path in Path("specs").iterdir()) == [
        "gpt_mlp35_base.yaml",
        "mine.yaml",
        "mine2.yaml",
        "schema.json",
        "tiny.yaml",
    ]


def test_init_of_a_spec_whose_name_is_elsewhere(here: Path, specc: Shell) -> None:
    assert specc("init", "mine", "--from", "tiny") == 2
    assert "has no line `name: ...` at the left margin" in specc.err
    bad(here)
    assert specc("init", "mine", "--from", "bad.yaml") == 2
    assert "S210" in specc.err
    assert not Path("specs/mine.yaml").exists()
