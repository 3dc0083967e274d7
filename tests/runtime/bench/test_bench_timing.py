"""Statistics of times, and the floors that the measured ceilings of a machine imply."""

from dataclasses import replace

import pytest
import torch

from specc.runtime.bench.ceilings import Ceilings, Work, measure
from specc.runtime.bench.kernels import Row
from specc.runtime.bench.timing import Measured, alternate

# 0.5 TFLOP/s, 2 TB/s copied, 2.5 TB/s read
CEILINGS = Ceilings("bfloat16", 1000, Measured(4.0, 0.01), 10**9, Measured(1.0, 0.02), Measured(0.4, 0.0))


def test_the_median_of_all_and_the_spread_of_two_passes() -> None:
    result = Measured.of([3.0, 1.0, 2.0], [2.5, 2.2, 9.0])
    assert result == Measured(2.35, 2.5 / 2.0 - 1)
    assert Measured.of([2.5], [2.0]).spread == pytest.approx(0.25)


def test_each_call_is_timed_twice_with_the_others_between() -> None:
    calls: list[str] = []

    def call(name: str) -> object:
        if not calls or calls[-1] != name:
            calls.append(name)
        return sum(range(20_000))

    result = alternate({name: lambda name=name: call(name) for name in "abc"}, torch.device("cpu"), 1 << 40)
    assert "".join(calls) == "abc" * 3  # warm, then two passes
    assert all(0 < time.ms < 100 and time.spread >= 0 for time in result.values())


def test_small_calls_find_a_cold_cache() -> None:
    """Before each call, reading more data than the cache holds evicts the data of the previous call."""
    seen: list[int] = []
    real = torch.Tensor.sum

    def watched(self: torch.Tensor) -> torch.Tensor:
        seen.append(self.nbytes)
        return real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "sum", watched)
        alternate({"a": lambda: None}, torch.device("cpu"), 1000)
        assert len(seen) >= 6 and min(seen) >= 64 << 20
        seen.clear()
        alternate({"a": lambda: None}, torch.device("cpu"), 1 << 40)
        assert not seen


def test_floors_by_hand() -> None:
    assert CEILINGS.flops_per_second == pytest.approx(0.5e12) and CEILINGS.bytes_per_second == pytest.approx(2e12)
    assert CEILINGS.floor_ms(Work(10**9, 10**9, 10**8)) == pytest.approx(2.0)
    assert CEILINGS.floor_ms(Work(10**8, 10**9, 10**8)) == pytest.approx(0.5)
    assert [CEILINGS.bound(Work(flops, 10**9, 10**8)) for flops in (10**9, 10**8)] == ["FLOPs", "bytes"]


def test_the_floor_of_calls_that_write_little_is_that_of_reading() -> None:
    assert CEILINGS.read_bytes_per_second == pytest.approx(2.5e12)
    assert CEILINGS.floor_ms(Work(1, 10**9, 0)) == CEILINGS.floor_ms(Work(1, 10**9, 10**9 // 16)) == pytest.approx(0.4)
    assert CEILINGS.floor_ms(Work(1, 10**9, 10**9 // 16 + 1)) == pytest.approx(0.5)
    assert CEILINGS.bound(Work(225 * 10**6, 10**9, 0)) == "FLOPs" != CEILINGS.bound(Work(225 * 10**6, 10**9, 10**8))
    slow = replace(CEILINGS, read=Measured(9.0, 0.0))  # a sum that waits for its additions
    assert slow.floor_ms(Work(1, 10**9, 0)) == pytest.approx(0.5)


def test_ratios() -> None:
    row = Row("up", "k", Work(1, 1, 1), {"generated": Measured(3.0, 0.0), "eager": Measured(4.0, 0.0)})
    assert row.time.ms == 3.0 and row.ratio("eager") == 0.75 and row.ratio("compile") is None
    library = Row("up", "library", Work(1, 1, 1), {"library": Measured(3.0, 0.0)})
    assert library.time.ms == 3.0 and library.ratio("eager") is None


def test_ceilings_of_this_machine() -> None:
    result = measure(torch.device("cpu"), torch.float32)
    assert result.dtype == "float32"
    assert 1e9 < result.flops_per_second < 1e14 and 1e8 < result.bytes_per_second < 1e13
