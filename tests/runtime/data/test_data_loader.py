"""The loader: global order, epochs, resume, and what happens in and to its background thread."""

import gc
import itertools
import math
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.shards.shard_file import ShardWriter
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.windows.loader import ORDERS, Loader, Order, epoch_order
from specc.runtime.data.windows.stream import TokenStream, open_stream

TOKENS = 10_000


class Wide(ByteTokenizer):
    """Takes any 16-bit token, so that a stream may count 0, 1, 2 ... and each token tells its position."""

    vocab = 65_536


def counting_stream(folder: Path, tokens: int = TOKENS, first: int = 0) -> TokenStream:
    for start in range(0, tokens, 3000):
        with ShardWriter(folder / f"train_{start:06d}.bin") as writer:
            writer.write(np.arange(start, min(tokens, start + 3000)) + first)
    return open_stream(folder, "train", Wide(), folder / "cache")


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> TokenStream:
    return counting_stream(tmp_path_factory.mktemp("shards"))


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("specc-loader")]


def take(loader: Loader, steps: int) -> list[list[int]]:
    """First tokens of the windows of each step; checks all other tokens on the way."""
    taken = []
    for _ in range(steps):
        ids, targets = loader.next()
        assert ids.dtype == targets.dtype == torch.int64 and ids.shape == targets.shape
        starts = ids[:, :1]
        assert torch.equal(ids, starts + torch.arange(ids.shape[1]))
        assert torch.equal(targets, ids + 1)
        taken.append(starts[:, 0].tolist())
    return taken


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(1, 50), st.integers(1, 3000), st.integers(0, 2**64), st.integers(0, 9), st.sampled_from(ORDERS[:2]))
def test_an_epoch_meets_every_block_once(length: int, extra: int, seed: int, epoch: int, order: Order) -> None:
    tokens = length + extra
    plan = epoch_order(tokens, length, order, seed, epoch)
    offsets = [plan.offset(k) for k in range(plan.blocks)]
    assert sorted(offsets) == [plan.phase + length * block for block in range(plan.blocks)]
    assert 0 <= plan.phase < length and plan.blocks == (tokens - 1 - plan.phase) // length >= 1
    assert max(offsets) + length + 1 <= tokens
    if order == "coprime_stride":
        assert math.gcd(plan.stride, plan.blocks) == 1
        steps = {(b - a) % (length * plan.blocks) for a, b in itertools.pairwise(offsets)}
        assert len(steps) <= 1
    else:
        assert offsets == sorted(offsets) and plan.phase == 0


def test_the_order_is_a_fixed_function_of_seed_and_epoch() -> None:
    plans = {
        (seed, epoch): epoch_order(TOKENS, 10, "coprime_stride", seed, epoch) for seed in range(9) for epoch in range(9)
    }
    assert len({(plan.start, plan.stride) for plan in plans.values()}) > 75
    assert {plan.phase for plan in plans.values()} == set(range(10))
    # a changed constant here would break the resume of every run that exists
    plan = epoch_order(1_000_000, 1024, "coprime_stride", 1337, 3)
    assert (plan.blocks, plan.phase, plan.start, plan.stride) == (976, 282, 836, 677)


def test_sequential_order_reads_the_stream_through(stream: TokenStream) -> None:
    with Loader(stream, 3, 100, "sequential", seed=0) as loader:
        windows = [window for step in take(loader, 66) for window in step]
    assert windows == [100 * block for block in [*range(99), *range(99)]]


def test_restore_rewinds_a_loader_in_use(stream: TokenStream) -> None:
    with Loader(stream, 2, 50, "coprime_stride", seed=1) as loader:
        start = loader.state()
        first = take(loader, 5)
        later = loader.state()
        rest = take(loader, 5)
        loader.restore(start)
        assert take(loader, 5) == first
        loader.restore(later)
        assert take(loader, 5) == rest
    assert not loader_threads()


def test_state_tells_what_was_taken_and_not_what_was_prefetched(stream: TokenStream) -> None:
    with Loader(stream, 2, 50, "sequential", seed=1, prefetch=5) as loader:
        states = [loader.state()]
        for _ in range(3):
            take(loader, 1)
            time.sleep(0.02)  # time for the thread to run ahead
            states.append(loader.state())
        assert [state["position"] for state in states] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("change", "name"), [({"length": 51}, "length"), ({"seed": 2}, "seed"), ({"order": "sequential"}, "order")]
)
def test_a_state_of_another_run_is_refused(stream: TokenStream, change: dict[str, object], name: str) -> None:
    settings: dict[str, object] = {"batch": 2, "length": 50, "order": "coprime_stride", "seed": 1}
    state = Loader(stream, **settings).state()  # type: ignore[arg-type]
    with pytest.raises(DataError, match=f"the difference is in {name}"):
        Loader(stream, **(settings | change)).restore(state)  # type: ignore[arg-type]


def test_a_state_of_other_data_or_no_state_is_refused(stream: TokenStream, tmp_path: Path) -> None:
    other = Loader(counting_stream(tmp_path, first=1), 2, 50, "sequential", seed=1)
    loader = Loader(stream, 2, 50, "sequential", seed=1)
    with pytest.raises(DataError, match="the difference is in stream"):
        loader.restore(other.state())
    with pytest.raises(DataError, match="the difference is in version, stream, length, order, seed"):
        loader.restore({})
    for bad in ({"epoch": -1}, {"position": "3"}, {"position": None}):
        with pytest.raises(DataError, match="is invalid"):
            loader.restore({**loader.state(), **bad})  # type: ignore[dict-item]


def test_too_short_a_stream_says_both_numbers(tmp_path: Path) -> None:
    stream = counting_stream(tmp_path, tokens=100)
    with pytest.raises(DataError, match="the stream has 100 tokens; windows of length 100 need 101"):
        Loader(stream, 1, 100, "sequential", seed=0)
    for order in ORDERS[:2]:
        with Loader(stream, 2, 99, order, seed=0) as loader:
            assert take(loader, 3) == [[0, 0]] * 3


@pytest.mark.parametrize("bad", [{"batch": 0}, {"length": 0}, {"rank": 2}, {"rank": -1}, {"world": 0}, {"prefetch": 0}])
def test_sizes_that_make_no_sense_are_refused(stream: TokenStream, bad: dict[str, int]) -> None:
    good: dict[str, int] = {"batch": 1, "length": 9, "seed": 0, "rank": 0, "world": 2}
    with pytest.raises(ValueError, match="must be positive"):
        Loader(stream, order="sequential", **(good | bad))
    with pytest.raises(DataError, match="unknown order 'random'"):
        Loader(stream, order="random", **good)  # type: ignore[arg-type]


class FailingStream:
    """Reads until told to fail."""

    digest = "0" * 64
    tokens = 1000

    def __init__(self) -> None:
        self.fails_from = 6

    def read(self, start: int, count: int) -> np.ndarray:
        if start >= self.fails_from * 10:
            raise OSError(5, "Input/output error")
        return np.arange(start, start + count, dtype=np.uint16)


def test_an_error_in_the_background_reaches_the_caller_after_the_batches_before_it() -> None:
    source = FailingStream()
    loader = Loader(source, 2, 10, "sequential", seed=0)  # type: ignore[arg-type]
    assert take(loader, 3) == [[0, 10], [20, 30], [40, 50]]
    state = loader.state()
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output error"):
            loader.next()
        assert not loader_threads() and loader.state() == state
    source.fails_from = 100
    assert take(loader, 2) == [[60, 70], [80, 90]]
    loader.close()


def test_a_shard_cut_during_training_is_an_error(tmp_path: Path) -> None:
    stream = counting_stream(tmp_path)
    with Loader(stream, 1, 100, "sequential", seed=0, prefetch=1) as loader:
        take(loader, 5)
        os.truncate(tmp_path / "train_003000.bin", 1024 + 2 * 1000)
        with pytest.raises(DataIntegrityError, match=r"train_003000\.bin: truncated while in use"):
            take(loader, 90)
        assert loader.state()["position"] == 39  # windows 0 .. 38 lie in the first 4,000 tokens, target included


def test_no_thread_outlives_its_loader(stream: TokenStream) -> None:
    loader = Loader(stream, 1, 10, "sequential", seed=0)
    assert not loader_threads()  # started by the first batch
    take(loader, 1)
    (thread,) = loader_threads()
    loader.close()
    loader.close()
    assert not thread.is_alive()
    take(loader, 1)
    (thread,) = loader_threads()
    del loader
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_prefetch_is_bounded(stream: TokenStream) -> None:
    reads: list[int] = []

    class Spy:
        digest, tokens = stream.digest, stream.tokens

        def read(self, start: int, count: int) -> np.ndarray:
            reads.append(start)
            return stream.read(start, count)

    with Loader(Spy(), 1, 10, "sequential", seed=0, prefetch=3) as loader:  # type: ignore[arg-type]
        loader.next()
        deadline = time.monotonic() + 10
        while len(reads) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert reads == [0, 10, 20, 30]  # one taken, three ready


def test_batches_are_the_callers_own(stream: TokenStream) -> None:
    with Loader(stream, 2, 10, "sequential", seed=0) as loader:
        ids, targets = loader.next()
        ids.fill_(-1)
        assert (targets >= 0).all() and ids.is_contiguous() and targets.is_contiguous()
        loader.next()
        assert (ids == -1).all()
