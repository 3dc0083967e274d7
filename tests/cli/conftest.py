"""A project folder, and a shell in it."""

import json
from pathlib import Path

import pytest
from cli_shell import Shell
from tiny_models import spec_data


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder of one small spec."""
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs/tiny.yaml").write_text(json.dumps(spec_data()))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def specc(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)
