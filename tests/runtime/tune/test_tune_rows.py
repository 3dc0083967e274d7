"""A measurement on the rows of training is not replaced by one on fewer rows without --fresh."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tune_samples import MACHINE

from specc.compiler.build import compile_loaded
from specc.compiler.errors import SpeccError
from specc.compiler.plan.lock import NO_LOCK, Entry, Lock, Machine, tile_data
from specc.compiler.spec.check import load
from specc.runtime.errors import RunFailure
from specc.runtime.tune import search
from specc.runtime.tune.search import TuneError, TuneOptions, tune

SPEC = Path(__file__).parents[3] / "specs/gpt_mini.yaml"


class SearchedError(Exception):
    """The search was begun."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with all that a search needs, up to its first measurement."""

    def begun(*_: object) -> None:
        raise SearchedError

    for name in ("find_nvcc", "nvcc_version", "find_cutlass"):
        monkeypatch.setattr(search, name, lambda *_: None)
    monkeypatch.setattr(search, "device_for", lambda _: torch.device("cpu"))
    monkeypatch.setattr(search, "machine_of", lambda _: MACHINE)
    monkeypatch.setattr(search.ceilings, "measure", begun)


def options(tmp_path: Path, rows: int, machine: Machine = MACHINE, fresh: bool = False, only: str = "") -> TuneOptions:
    """Options for a lock whose dgrad_mul was measured on `rows` rows."""
    spec, _ = load(SPEC)
    plan = compile_loaded(spec, None, ("sm90",)).plans["sm90"]
    choice = next(option for option in plan.generated if "dgrad_mul" in option.rendered.module)
    kernel, tile = choice.kernel.name, tile_data(choice.kernel)
    entry = Entry(
        node=choice.site.label, key=choice.site.key, kernel=kernel, tile=tile, rows=rows, ms=1.0, floor_ms=0.5
    )
    lock: Lock = NO_LOCK.with_measured("sm90", machine, {choice.rendered.module: entry})
    return TuneOptions(spec, "sm90", lock, tmp_path / "gpt_mini.lock.json", only=only, fresh=fresh)


def rows_of_the_spec() -> int:
    spec, _ = load(SPEC)
    return spec.train.at_once() * spec.model.window


def test_fewer_rows_are_refused(tmp_path: Path, machine: None) -> None:
    rows = rows_of_the_spec()
    with pytest.raises(SpeccError) as error:
        tune(options(tmp_path, rows + 1), print)
    assert error.value.exit_code == 2 and "--fresh" in error.value.hint
    assert error.value.message.endswith(f"was measured on {rows + 1:,} rows, but this search has only {rows:,}")
    assert not (tmp_path / "gpt_mini.lock.json").exists()


@pytest.mark.parametrize(
    ("more", "changed"),
    [
        (0, {}),
        (-1, {}),
        (1, {"fresh": True}),
        (1, {"only": "mlp.up"}),  # which the entry is not of
        (1, {"machine": MACHINE.model_copy(update={"gpu": "NVIDIA H100"})}),  # whose entries leave the lock
    ],
)
def test_else_it_is_searched(tmp_path: Path, machine: None, more: int, changed: dict[str, object]) -> None:
    with pytest.raises(SearchedError):
        tune(options(tmp_path, rows_of_the_spec() + more, **changed), print)  # type: ignore[arg-type]


def test_without_a_search_only_the_rest_is_measured(
    tmp_path: Path, machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []
    monkeypatch.setattr(search, "measure_rest", lambda *arguments: measured.append(arguments))
    given = replace(options(tmp_path, rows_of_the_spec() - 1), rest=True, search=False)
    assert tune(given, print) == () and len(measured) == 1
    with pytest.raises(TuneError, match="measures kernels of a GPU, but the target is cpu"):
        tune(replace(given, target="cpu"), print)


def test_short_memory_does_not_ask_for_an_override(
    tmp_path: Path, machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(search.ceilings, "measure", lambda *_: None)
    monkeypatch.setattr(search, "_search", full)
    with pytest.raises(RunFailure) as error:
        tune(options(tmp_path, 1), print)
    assert "--set" not in error.value.hint and "in the spec" in error.value.hint
