"""The committed sweep files: every setting is valid for the committed spec that it changes."""

from pathlib import Path

import pytest

from specc.compiler.spec.check import check_as, load
from specc.compiler.text.source import read
from specc.runtime.sweep.file import SweepFile

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_settings_are_valid_and_differ(path: Path) -> None:
    sweep = check_as(SweepFile, read(path))
    specs = {s.name: load(ROOT / sweep.spec, (*sweep.set, *s.set))[0] for s in sweep.settings}
    texts = {spec.model_dump_json() for spec in specs.values()}
    assert specs and len(texts) == len(specs)
    assert all(sweep.target is None or sweep.target in spec.targets for spec in specs.values())
