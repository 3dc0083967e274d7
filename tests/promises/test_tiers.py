"""A soak that was stopped goes on with the round that it stopped in."""

from pathlib import Path
from typing import Any

import pytest
import tiers
from tiers import done_today, record, rounds_left


class Notes:
    """The cache of pytest, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def get(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value


def test_rounds_that_passed_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: Any = Notes()
    monkeypatch.delenv("SPECC_SOAK_AGAIN", raising=False)
    with pytest.raises(AssertionError):
        for name in rounds_left(notes, "C1", ["a", "b", "c"]):
            assert name != "b"
    assert [*rounds_left(notes, "C1", ["a", "b", "c"])] == ["b", "c"]
    assert [*rounds_left(notes, "C1", ["a", "b", "c", "d"])] == ["d"]
    assert [*rounds_left(notes, "C2", ["a"])] == ["a"]
    monkeypatch.setenv("SPECC_SOAK_AGAIN", "1")
    assert [*rounds_left(notes, "C1", ["a", "b"])] == ["a", "b"]
    monkeypatch.delenv("SPECC_SOAK_AGAIN")
    notes.values["specc/C1"]["date"] = "2020-01-01"
    assert [*rounds_left(notes, "C1", ["a"])] == ["a"]
    assert [*rounds_left(notes, "C1", ["b"])] == ["b"]
    monkeypatch.setattr(tiers, "sources", lambda: "changed")
    assert [*rounds_left(notes, "C1", ["b"])] == ["b"]


def test_a_result_counts_for_the_same_sources_and_as_many_trials(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SPECC_SOAK_AGAIN", raising=False)
    monkeypatch.setattr(tiers, "RESULTS", tmp_path / "promises.json")
    for passed in (False, True):
        record("C1", "a.py::test_a", {"flips": 20}, 1.0, passed)
        assert done_today("a.py::test_a", {"flips": 20}) == passed
    assert not done_today("a.py::test_a", {"flips": 21}) and not done_today("a.py::test_b", {"flips": 20})
    monkeypatch.setattr(tiers, "sources", lambda: "changed")
    assert not done_today("a.py::test_a", {"flips": 20})


def test_the_digest_of_sources_follows_names_and_contents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiers, "TESTS", tmp_path / "tests")
    (tmp_path / "runtime").mkdir()
    digests = []
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "2"), ("a.pyc", "3")):
        (tmp_path / "runtime" / name).write_text(text)
        tiers.sources.cache_clear()
        digests.append(tiers.sources())
    tiers.sources.cache_clear()
    assert len({*digests[:3]}) == 3 and digests[3] == digests[2]
