"""Batches of pairs: one order for any number of ranks and passes, exact resuming, honest counts and weights."""

from collections.abc import Iterator
from contextlib import closing
from itertools import islice

import numpy as np
import pytest
import torch

from specc.runtime.data.errors import DataError
from specc.runtime.data.lines.loader import FixedSet, FreshSamples, PairLoader, Samples
from specc.runtime.data.lines.pairs import Pairs
from specc.runtime.data.lines.polynomial import SYMBOLS, draw
from specc.runtime.data.lines.polynomial_task import Fresh, training_set
from specc.runtime.data.tokenizers.characters import CharTokenizer

CPU = torch.device("cpu")
TOKENS = CharTokenizer(SYMBOLS)
FRESH = Fresh(5, 300)


def pairs(count: int = 100) -> Pairs:
    return Pairs.of(draw("pairs", 1, 0, count), TOKENS, 30)


def samples(kind: str) -> Samples:
    return FixedSet(pairs(), 9, CPU) if kind == "fixed" else FreshSamples(FRESH, TOKENS, 30)


def texts(loader: PairLoader) -> Iterator[str]:
    """The lines of each batch, endlessly."""
    while True:
        source, target, _ = loader.next()
        both = (TOKENS.decode_rows(side.numpy()) for side in (source, target))
        yield from (f"{a}={b}" for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("kind", ["fixed", "fresh"])
def test_any_number_of_ranks_and_passes_gets_the_same_steps(kind: str) -> None:
    with PairLoader(samples(kind), 24, 1, CPU) as alone:
        steps = [list(islice(texts(alone), 24)) for _ in range(6)]
    for passes, world in ((1, 2), (3, 1), (2, 3), (1, 24)):
        rows = 24 // passes // world
        loaders = [PairLoader(samples(kind), rows, passes, CPU, rank, world) for rank in range(world)]
        streams = [texts(loader) for loader in loaders]
        for step in steps:
            results = [list(islice(stream, rows * passes)) for stream in streams]
            # rank r of a pass has the samples r, r + world, ...
            order = [
                results[k % world][part * rows + k // world] for part in range(passes) for k in range(rows * world)
            ]
            assert order == step
        assert len({(loader.samples, loader.tokens) for loader in loaders}) == 1
        for loader in loaders:
            loader.close()


def test_an_epoch_is_a_permutation_and_the_next_one_another() -> None:
    sides = (TOKENS.decode_rows(side) for side in (pairs().source, pairs().target))
    everything = sorted(f"{a}={b}" for a, b in zip(*sides, strict=True))
    with PairLoader(FixedSet(pairs(), 9, CPU), 30, 1, CPU) as loader:
        stream = texts(loader)
        epochs = [list(islice(stream, 100)) for _ in range(3)]  # no multiple of the batch: nothing is dropped
    assert [sorted(epoch) for epoch in epochs] == [everything] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    with PairLoader(FixedSet(pairs(), 10, CPU), 30, 1, CPU) as other:
        assert list(islice(texts(other), 100)) != epochs[0]


def test_the_order_never_changes() -> None:
    chosen, _ = FixedSet(pairs(10), 0, CPU).take(0, 12)
    order = [1, 4, 2, 0, 6, 3, 8, 9, 5, 7, 0, 8]
    assert chosen.rows(slice(None), CPU)[0].tolist() == pairs(10).source[order].tolist()


def test_fresh_samples_are_those_of_the_stream() -> None:
    with PairLoader(samples("fresh"), 50, 6, CPU) as loader:
        assert list(islice(texts(loader), 300)) == training_set(5, 300).texts()
        more, _ = FRESH.take(300, 150)
        assert list(islice(texts(loader), 150)) == more.texts()


@pytest.mark.parametrize("kind", ["fixed", "fresh"])
def test_resuming_is_exact(kind: str) -> None:
    """Also with other passes and ranks."""
    with PairLoader(samples(kind), 8, 2, CPU) as whole:
        stream = texts(whole)
        first = list(islice(stream, 16 * 9))
        state, counts = whole.state(), (whole.samples, whole.tokens)
        rest = list(islice(stream, 16 * 5))
        end = whole.samples, whole.tokens
    assert counts[0] == 144 and len(first) == 144
    for passes, rows in ((2, 8), (1, 16), (4, 4)):
        with PairLoader(samples(kind), rows, passes, CPU) as again:
            again.next()
            again.restore(state)
            assert (again.samples, again.tokens) == counts
            assert list(islice(texts(again), 16 * 5)) == rest
            assert (again.samples, again.tokens) == end


def test_a_state_of_other_data_is_refused() -> None:
    loader = PairLoader(FixedSet(pairs(), 9, CPU), 8, 1, CPU)
    for other in (FixedSet(pairs(99), 9, CPU), FixedSet(pairs(), 8, CPU), samples("fresh")):
        with pytest.raises(DataError, match="the difference is in pairs"):
            loader.restore(PairLoader(other, 8, 1, CPU).state())
    with pytest.raises(DataError, match="is invalid"):
        loader.restore({**loader.state(), "position": -1})


def test_weights_make_the_mean_over_all_target_tokens() -> None:
    """Of a step in uneven passes over two ranks, the mean of weighted means is the mean over the step's tokens."""
    rows, passes, world = 4, 3, 2
    loaders = [PairLoader(samples("fixed"), rows, passes, CPU, rank, world) for rank in range(world)]
    for _ in range(5):
        sums, tokens, means = 0.0, 0, []
        for loader in loaders:
            for _ in range(passes):
                source, target, weight = loader.next()
                losses = (source.double() - target.double()) ** 2 + 1  # any number a token
                real = target != 0
                sums, tokens = sums + float(losses[real].sum()), tokens + int(real.sum())
                means.append(float(losses[real].mean()) * float(weight))
        assert np.mean(means) == pytest.approx(sums / tokens, rel=1e-6)
        assert len({round(mean, 9) for mean in means}) > 1
    with PairLoader(samples("fixed"), 24, 1, CPU) as alone:
        assert float(alone.next()[2]) == 1.0


def test_tokens_are_counted_without_pads() -> None:
    with PairLoader(samples("fixed"), 20, 1, CPU) as loader:
        source, target, _ = loader.next()
        assert (loader.samples, loader.tokens) == (20, int((source != 0).sum() + (target != 0).sum()))
        assert source.dtype == target.dtype == torch.int64 and source.shape == target.shape == (20, 30)


def test_an_error_in_the_thread_comes_out_and_the_next_call_tries_again() -> None:
    class Broken:
        digest = "0" * 64
        calls = 0

        def take(self, position: int, count: int):  # type: ignore[no-untyped-def]
            self.calls += 1
            if self.calls == 2:
                raise DataError("the disk is full")
            return samples("fixed").take(position, count)

    with closing(PairLoader(Broken(), 10, 1, CPU)) as loader:
        stream = texts(loader)
        first = list(islice(stream, 10))
        with pytest.raises(DataError, match="disk is full"):
            loader.next()
        second = list(islice(texts(loader), 10))
    with PairLoader(samples("fixed"), 10, 1, CPU) as sound:
        assert list(islice(texts(sound), 20)) == first + second


def test_the_first_pairs_within_so_many_tokens() -> None:
    some = pairs()
    sizes = (some.target != 0).sum(axis=1)
    assert len(some.within(None)) == 100
    assert len(some.within(int(sizes[:7].sum()))) == 7
    assert len(some.within(int(sizes[:7].sum()) - 1)) == 6
    assert len(some.within(1)) == 1
