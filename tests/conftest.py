"""Requirements of tests: tests that need a GPU, nvcc or much time are deselected, with a line that says so.

The fixture `trials` of tests in two tiers; it records the results of `make soak`.
"""

import gc
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cards import USUAL, gigabytes_of, memory_limit, memory_of_one_test, use_card_of_worker
from tiers import Trials, done_today, record

# On matrices as small as those of tests, threads only wait for each other. Torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is looked up anywhere: models are made from configs
LEFT_OUT = pytest.StashKey[list[str]]()
PASSED = pytest.StashKey[bool]()
MEMORY, ROOM = Path("/dev/shm"), 4 << 30  # a folder in memory, and the free bytes that it must have
TESTS = Path(__file__).parent
SLOW = ("runtime", "cli", "docs", "errors", "generated")  # folders whose files take long
LONG = (  # files that take half a minute or more
    "docs/test_docs.py",
    "compiler/kernels/test_rope_attention.py",
    "runtime/distributed/test_distributed.py",
    "generated/test_generated.py",
    "errors/test_errors.py",
    "runtime/export/test_export_graphs.py",
    "runtime/submission/test_submission.py",
    "compiler/passes/test_recompute.py",
    "runtime/model/test_stored_programs.py",
    "runtime/hugging_face/test_round_trip.py",
    "cli/test_init.py",
    "compiler/kernels/test_attention_cached.py",
    "runtime/train/test_recompute_order.py",
    "runtime/model/test_chunked_loss.py",
    "runtime/calibration/test_uses.py",
    "runtime/bench/test_bench_cli.py",
    "runtime/decode/test_few_rows.py",
    "runtime/hugging_face/test_mutations.py",
    "compiler/kernels/test_ahead_of_time.py",
    "runtime/bench/test_bench_text.py",
)


def _keep_temporary_folders_in_memory() -> None:
    """Creates the temporary folders of tests in memory if there is room: fsync and removal then take no time."""
    meminfo = Path("/proc/meminfo")
    available = re.search(r"MemAvailable: +(\d+)", meminfo.read_text()) if meminfo.is_file() else None
    if (
        available is not None
        and os.access(MEMORY, os.W_OK)
        and min(int(available[1]) << 10, shutil.disk_usage(MEMORY).free) >= ROOM
    ):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


_keep_temporary_folders_in_memory()  # before pytest creates the first; processes of pytest-xdist inherit it
use_card_of_worker()  # before Torch is imported
gc.disable()  # while modules are imported and tests collected: nothing of it becomes garbage


def _place(item: pytest.Item) -> tuple[int, bool]:
    """Long files come first, then those of slow folders. Other items keep their order."""
    path = item.path.relative_to(TESTS)
    name = path.as_posix()
    return LONG.index(name) if name in LONG else len(LONG), path.parts[0] not in SLOW


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    # A suite started in the background or by nohup inherits ignored signals, and so would every process it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.stash[LEFT_OUT] = []
    with suppress(ImportError):  # GPU machines may have no hypothesis, and no test there wants it
        from hypothesis import HealthCheck, settings

        # how fast examples are drawn and tried is the machine's business
        settings.register_profile("specc", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("specc")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Processes of pytest-xdist take whole files: with short files at the end, all processes end together.
    items.sort(key=_place)
    missing: dict[str, str] = {}
    if "soak" not in (config.option.markexpr or "") and any(item.get_closest_marker("soak") for item in items):
        missing["soak"] = "they take minutes; `-m soak` selects them"
    if any(item.get_closest_marker("nvcc") for item in items) and shutil.which("nvcc") is None:
        if os.environ.get("CI") == "true":
            raise pytest.UsageError("CI needs nvcc: the kernels have to compile")
        missing["nvcc"] = "nvcc is not installed"
    if any(item.get_closest_marker("gpu") for item in items) and not _has_gpu():
        missing["gpu"] = "there is no NVIDIA GPU"
    if any(item.get_closest_marker("cute") for item in items) and find_spec("flash_attn") is None:
        missing["cute"] = "flash-attn-4 is not installed: pip install 'specc[flash]'"
    for marker, reason in missing.items():
        left_out = [item for item in items if item.get_closest_marker(marker)]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
        config.stash[LEFT_OUT].append(f"{len(left_out)} {marker} tests deselected: {reason}")
    limit = memory_limit()
    if limit is not None and (large := [item for item in items if gigabytes_of(item) > max(limit, USUAL)]):
        items[:] = [item for item in items if item not in large]
        config.hook.pytest_deselected(items=large)
        config.stash[LEFT_OUT].append(f"{len(large)} gpu tests deselected: they need more than {limit:g} GB of a GPU")
    if hasattr(config, "workeroutput"):  # a process of pytest-xdist, which has no terminal
        config.workeroutput["left_out"] = config.stash[LEFT_OUT]


def pytest_collection_finish() -> None:
    if "torch" in sys.modules:
        import quick_torch

        quick_torch.quicken()
    gc.freeze()  # no later collection walks through the modules and tests
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every process of pytest-xdist collects, and leaves out, the same tests."""
    node.config.stash[LEFT_OUT][:] = getattr(node, "workeroutput", {}).get("left_out", ())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash[LEFT_OUT]:
        terminalreporter.write_line(line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[Any]:
    report = yield
    if report.when == "call" and not report.skipped:
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture(autouse=True)
def _gpu_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """The memory that a test with the marker `gpu` may allocate."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    with memory_of_one_test(memory_limit()):
        yield


@pytest.fixture
def trials(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Iterator[Trials]:
    promise, numbers = request.param
    test = f"{request.node.path.relative_to(TESTS).as_posix()}::{request.node.originalname}"
    if request.node.get_closest_marker("soak") is None:
        yield numbers
        return
    if done_today(test, numbers):
        pytest.skip("passed today with as many trials")
    began = time.monotonic()
    yield numbers
    passed = request.node.stash.get(PASSED, None)
    if passed is None:  # the test was skipped
        return
    gpu = request.node.get_closest_marker("gpu") is not None
    line = record(promise, test, numbers, time.monotonic() - began, passed, gpu)
    reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"\n{line}")
