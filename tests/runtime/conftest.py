"""Fixtures that several folders share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from command_server import folder_of_specc
from run_samples import SPEC, make_run, small_spec, write_text

from specc.compiler.build import compile_spec
from specc.compiler.plan.plan import Plan
from specc.runtime.bench.ceilings import SIZES
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.windows.stream import TokenStream, open_stream
from specc.runtime.storage.run_directory import Run


@pytest.fixture(scope="session")
def plan() -> Plan:
    """The plan of gpt_mini for sm90."""
    return compile_spec(SPEC, (), ("sm90",)).plans["sm90"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenStream]:
    """The training tokens of `write_text`."""
    folder = tmp_path_factory.mktemp("text")
    opened = open_stream(write_text(folder / "data"), "train", ByteTokenizer(), folder / "cache")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A small run of gpt_mini, not quantized."""
    folder = tmp_path_factory.mktemp("run")
    return make_run(folder / "run", small_spec(), str(write_text(folder / "data")))


@pytest.fixture
def few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer backward passes for estimates, whose accuracy is tested in tests/runtime/calibration."""
    monkeypatch.setattr("specc.runtime.calibration.added_nats.PASSES", 32)


@pytest.fixture(scope="module")
def short_passes() -> Iterator[None]:
    """Benchmarks that take little time. How long and how often a call is timed, that caches are cold before it, and the
    ceilings of large tensors are tested in test_bench_timing.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specc.runtime.bench.timing.SECONDS", 0.01)
        patch.setattr("specc.runtime.bench.timing.HOST_CACHE", 1 << 20)
        patch.setitem(SIZES, "cpu", (256, 8 << 20))
        yield


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server runs the processes that commands start in this process."""
    monkeypatch.setattr("sys.executable", str(folder_of_specc() / "specc-python"))
