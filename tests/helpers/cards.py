"""GPU tests that share cards: one card for each process of pytest-xdist, a limit of its memory, and its release.

    pytest -m gpu -n 8                       with 4 cards, two processes use each
    SPECC_TEST_GPU_GB=36 pytest -m gpu -n 8  each process allocates at most 36 GB

A test that needs more than USUAL says so: `@pytest.mark.gpu(gigabytes=40)`. It is left out if the limit is lower.
"""

import gc
import os
import subprocess
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

import pytest

LIMIT = "SPECC_TEST_GPU_GB"
USUAL = 8.0  # gigabytes that are enough for a test whose marker has no number
CACHED = 1 << 28  # bytes that an allocator may keep from one test to the next
CARDS = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")


def use_card_of_worker(environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes one card visible to a process of pytest-xdist, in turn. Torch reads the variable when it starts CUDA."""
    worker = environment.get("PYTEST_XDIST_WORKER", "")
    if worker.startswith("gw") and len(cards := visible_cards(environment)) > 1:
        environment["CUDA_VISIBLE_DEVICES"] = cards[int(worker[2:]) % len(cards)]


def visible_cards(environment: MutableMapping[str, str]) -> list[str]:
    """Returns the numbers or names of the cards that a process may use."""
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        try:
            text = subprocess.run(CARDS, capture_output=True, text=True, check=True, timeout=60).stdout
        except (OSError, subprocess.SubprocessError):  # there is no driver
            return []
    return text.replace(",", " ").split()


def memory_limit(environment: MutableMapping[str, str] = os.environ) -> float | None:
    """Returns the gigabytes that a process may allocate; None without a limit.

    Raises pytest.UsageError if the variable is not a positive number.
    """
    text = environment.get(LIMIT, "")
    try:
        limit = float(text) if text else None
    except ValueError:
        limit = 0.0
    if limit is not None and not 0 < limit < float("inf"):
        raise pytest.UsageError(f"{LIMIT} is {text!r}; expected gigabytes, such as 20")
    return limit


def gigabytes_of(item: pytest.Item) -> float:
    """Returns the gigabytes of GPU memory that a test needs; 0 for a test without the marker `gpu`."""
    markers = [*item.iter_markers("gpu")]
    return max((marker.kwargs.get("gigabytes", USUAL) for marker in markers), default=0.0)


@contextmanager
def memory_of_one_test(limit: float | None) -> Iterator[None]:
    """Limits the memory of this process on its card to `limit` gigabytes, and returns what the test leaves cached."""
    import torch

    if limit is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit * 1e9 / total))
    yield
    if torch.cuda.memory_reserved() > CACHED:
        gc.collect()  # CUDA graphs and modules refer to themselves
        torch.cuda.empty_cache()
