"""The generated files of docs/ are those of the code."""

import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_docs_are_as_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    import generate

    stale = [name for name, text in generate.files().items() if not generate.current(DOCS / name, text)]
    assert not stale, "run python docs/generate.py --write"
