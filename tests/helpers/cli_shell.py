"""Commands in this process, and what their tests share."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import jsonschema
import pytest
from tiny_models import spec_data

from specc.cli import app
from specc.compiler.errors.formats import schema_text

ROOT = Path(__file__).parents[2]


ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Shell:
    """Runs commands in process and keeps what the last one printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: str) -> int:
        self.capsys.readouterr()
        code = app.run(list(arguments))
        read = self.capsys.readouterr()
        self.out, self.err = ANSI.sub("", read.out), ANSI.sub("", read.err)
        return code


class Broken(Exception):
    """An error that says nothing of an exit code."""


def bad(here: Path, **model: object) -> str:
    """A spec with one wrong value."""
    data = spec_data(**model)
    data["model"]["dim"] = 7
    (here / "bad.yaml").write_text(json.dumps(data, indent=1))
    return "bad.yaml"


def stamps(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted([folder, *folder.rglob("*")])}


def commands(group: app.LazyGroup) -> Iterator[tuple[app.LazyGroup, click.Command]]:
    """All commands that help lists, as it lists them, with the group of each."""
    for entry in group.commands.values():
        yield from commands(entry) if isinstance(entry, app.LazyGroup) else [(group, entry)]


def require_findings(document: str, codes: list[str]) -> list[dict[str, object]]:
    """Holds a document to the published schema, and to the codes of its findings."""
    findings: list[dict[str, object]] = json.loads(document)
    jsonschema.validate(findings, json.loads(schema_text()), jsonschema.Draft202012Validator)
    assert [finding["code"] for finding in findings] == codes
    return findings
