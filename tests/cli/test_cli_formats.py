"""Errors and findings as text, JSON, SARIF and annotations, and colors."""

import json
import re
import shutil
import sys
from pathlib import Path

import click
import pytest
from cli_shell import Broken, Shell, bad, commands, require_findings

from specc.cli import app, output


@pytest.mark.parametrize("form", ["json", "github", "text"])
@pytest.mark.parametrize("command", ["build", "validate", "plan", "explain", "ir"])
def test_errors_in_the_format_that_was_asked_for(here: Path, specc: Shell, command: str, form: str) -> None:
    name = bad(here)
    assert specc(command, name, "--format", form) == 2
    message = "`heads` is 2, which does not divide the width 7"
    if form == "json":
        (result,) = json.loads(specc.out)
        assert (result["code"], result["message"], result["file"]) == ("S210", message, name)
        assert Path(name).read_text().splitlines()[result["line"] - 1].strip().startswith('"heads"')
        assert specc.err == ""
    elif form == "github":
        assert re.fullmatch(rf"::error file={name},line=\d+,col=\d+,title=S210::{message}%0A.*\n", specc.out)
    else:
        assert specc.out == ""
        assert re.match(rf"{name}:\d+:\d+: S210 {message}\n", specc.err)


def test_validate_tells_of_all_files_in_one_document(here: Path, specc: Shell) -> None:
    name = bad(here)
    shutil.copy(name, "worse.yaml")
    assert specc("validate", name, "specs/tiny.yaml", "worse.yaml", "nope.yaml", "--format", "json") == 2
    assert [(entry["file"], entry["code"]) for entry in json.loads(specc.out)] == [
        ("bad.yaml", "S210"),
        ("nope.yaml", "S001"),
        ("worse.yaml", "S210"),
    ]
    assert specc("validate", "specs/tiny.yaml", "--format", "json") == 0
    assert json.loads(specc.out) == []
    assert specc("validate", "specs/tiny.yaml") == 0
    assert specc.out == "specs/tiny.yaml: ok\n"


@pytest.mark.parametrize(
    "arguments", [["plan", "--nope"], ["build", "--check=1"], ["train", "--steps", "many"], ["nope"]]
)
def test_errors_of_the_command_line_have_the_format_too(specc: Shell, arguments: list[str]) -> None:
    assert specc(*arguments) == 2 and specc.out == ""
    assert specc(*arguments, "--format", "json") == 2 and specc.err == ""
    (error,) = json.loads(specc.out)
    assert error["message"] and error["hint"].endswith("--help")
    assert specc("--format=github", *arguments) == 2 and specc.err == ""
    assert specc.out.startswith("::error title=U001::")


def test_a_missing_value_has_the_help_of_the_command_as_its_hint(specc: Shell) -> None:
    assert specc("--format", "json", "plan", "specs/tiny.yaml", "--set") == 2
    assert json.loads(specc.out)[0]["hint"] == "specc plan --help"


@pytest.mark.parametrize(
    ("variables", "colors"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colors_are_for_terminals_that_want_them(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], colors: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not output.colored()  # here standard error is no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert output.colored() == colors


def test_every_command_takes_every_format(specc: Shell) -> None:
    for group, entry in commands(app.specc):
        command = group.loaded(entry)
        format_option = next(option for option in command.params if "--format" in option.opts)
        assert isinstance(format_option.type, click.Choice)
        if entry.name == "export":  # its format is that of the export; `specc --format json export` has that of errors
            continue
        assert set(format_option.type.choices) >= {"text", "json", "github", "sarif"}, entry.name
        words = [*([group.name] if group is not app.specc else []), entry.name, "--no-such-option"]
        assert specc(*map(str, words), "--format", "json") == 2 and specc.err == ""
        require_findings(specc.out, ["U001"])
        assert specc(*map(str, words), "--format", "sarif") == 2
        assert json.loads(specc.out)["runs"][0]["results"][0]["ruleId"] == "U001"
    assert specc("--format", "json", "export", "nowhere", "--format", "safetensors") == 2
    require_findings(specc.out, ["U002"])


@pytest.mark.parametrize(
    ("arguments", "code", "codes"),
    [
        (["validate", "specs/tiny.yaml"], 0, []),
        (["plan", "specs/tiny.yaml"], 0, []),
        (["plan", "nope.yaml"], 2, ["S001"]),
        (["build", "specs/tiny.yaml", "--check"], 1, ["F001"] * 6),
        (["build", "specs/tiny.yaml", "--diff"], 1, ["F001"]),
        (["explain", "specs/tiny.yaml"], 0, []),
        (["explain", "S104"], 0, []),
        (["explain", "S999"], 2, ["U001"]),
        (["ir", "specs/tiny.yaml"], 0, []),
        (["ir", "specs/tiny.yaml", "--after", "nope"], 2, ["U001"]),
        (["diff", "specs/tiny.yaml", "specs/tiny.yaml"], 0, []),
        (["diff", "specs/tiny.yaml", "other.yaml"], 1, ["F004"]),
        (["init", "a-b", "--from", "tiny"], 2, ["U002"]),
        (["schema"], 0, []),
        (["schema", "--check"], 1, ["F002"]),
        (["migrate", "old.yaml", "--check"], 1, ["F003"]),
        (["migrate", "specs/tiny.yaml", "--check"], 0, []),
    ],
)
def test_the_document_of_a_command_has_its_findings_and_nothing_else(
    here: Path, specc: Shell, arguments: list[str], code: int, codes: list[str]
) -> None:
    text = Path("specs/tiny.yaml").read_text()
    Path("other.yaml").write_text(text.replace("relu(x) ** 2", "gelu(x)"))
    Path("old.yaml").write_text(re.sub(r'"spec_version": \d', '"spec_version": 1', text))
    assert specc(*arguments, "--format", "json") == code
    require_findings(specc.out, codes)
    assert specc(*arguments, "--format", "sarif") == code
    assert [result["ruleId"] for result in json.loads(specc.out)["runs"][0]["results"]] == codes
    assert specc(*arguments, "--format", "github") == code
    assert re.findall(r"^::error .*title=(\w+)::", specc.out, re.MULTILINE) == codes
    assert specc(*arguments) == code and "::error" not in specc.out


def test_with_json_the_result_is_the_only_document(here: Path, specc: Shell) -> None:
    assert specc("plan", "specs/tiny.yaml", "--json", "--format", "json") == 0
    assert json.loads(specc.out)["parameters"] > 0
    assert specc("plan", "nope.yaml", "--json", "--format", "json") == 2
    require_findings(specc.out, ["S001"])


def test_a_bug_has_a_code_and_a_document(here: Path, specc: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object, **words: object) -> None:
        raise Broken("boom")

    monkeypatch.setattr("specc.compiler.build.plan_spec", failing)
    assert specc("validate", "specs/tiny.yaml", "--format", "json") == 70 and "Traceback" in specc.err
    (finding,) = require_findings(specc.out, ["B001"])
    assert finding["message"] == "Broken: boom"


def test_drift_in_the_format_that_was_asked_for(here: Path, specc: Shell) -> None:
    assert specc("build") == 0
    assert specc("build", "--check", "--format", "json") == 0 and json.loads(specc.out) == []
    assert specc("build", "--check", "--format", "github") == 0 and specc.out == ""
    Path("generated/tiny/PLAN.md").unlink()
    assert specc("build", "--check", "--format", "json") == 1
    (finding,) = json.loads(specc.out)
    assert (finding["code"], finding["file"], finding["message"]) == ("F001", "generated/tiny/PLAN.md", "missing")
    assert specc("build", "--check", "--format", "github") == 1
    assert specc.out == "::error file=generated/tiny/PLAN.md,line=1,col=1,title=F001::missing%0Aspecc build\n"
