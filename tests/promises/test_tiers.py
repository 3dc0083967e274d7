"""A soak that was stopped goes on with the round that it stopped in."""

from typing import Any

import pytest
from tiers import rounds_left


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
