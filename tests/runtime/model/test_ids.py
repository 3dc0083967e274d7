"""Inputs that a loaded model refuses, and when it checks them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from int8_models import BLOCKS, LSTM, data_of
from tiny_models import ATTENTION, MLP, spec_data, spec_of

from specc.runtime.model.guards import Unchecked, check_programs
from specc.runtime.model.load import initialize, instantiate

ROWS = torch.tensor([[5, 6, 2], [7, 2, 0]])


def checked(data: dict[str, Any], folder: Path) -> Any:
    spec = spec_of(data)
    loaded = instantiate(spec, "cpu", folder)
    initialize(loaded, 1)
    check_programs(loaded.model, loaded.programs, spec.model.vocabulary)
    return loaded.model.eval()


@pytest.fixture(scope="module", params=["lstm", "blocks"])
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return checked(data_of({"lstm": LSTM, "blocks": BLOCKS}[request.param]), tmp_path_factory.mktemp("pairs"))


def odd(place: tuple[int, int], token: int) -> torch.Tensor:
    rows = ROWS.clone()
    rows[place] = token
    return rows


@torch.no_grad()
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (odd((1, 2), 31), r"source\[1, 2\] is 31; the vocabulary has ids 0 to 30"),
        (odd((0, 0), -1), r"source\[0, 0\] is -1"),
        (ROWS.float(), r"source is torch.float32; it must be torch.int64 \[B, S\]"),
        (ROWS.bool(), "source is torch.bool"),
        (ROWS[0], r"source has the shape \[3\]; it must be torch.int64 \[B, S\]"),
        (ROWS[:, :0], r"source is empty: its shape is \[2, 0\]"),
        (ROWS[:0], "source is empty"),
        (ROWS.repeat(1, 11), "source has 33 tokens per row; the model's context is 30"),
        ([[5, 2]], "source is list; it must be a tensor"),
        (ROWS.to("meta"), "source is on meta, and the model on cpu"),
    ],
)
def test_sources_that_are_none(pairs: Any, source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pairs.encode(source)
    with pytest.raises(ValueError, match=message):
        pairs.score(source, ROWS)


@torch.no_grad()
def test_steps_that_are_none(pairs: Any) -> None:
    zero, state = torch.tensor(0), pairs.encode(ROWS)
    for ids, start, message in (
        (torch.tensor([[1], [40]]), zero, r"ids\[1, 0\] is 40"),
        (torch.tensor([[1, 1], [1, 1]]), zero, r"ids has the shape \[2, 2\]; it must be torch.int64 \[B, 1\]"),
        (torch.tensor([1, 1]), zero, r"ids has the shape \[2\]; it must be torch.int64 \[B, 1\]"),
        (torch.tensor([[1]]), zero, "the state has 2 rows, and ids has 1"),
        (torch.tensor([[1], [1]]), torch.tensor(30), "start is 30; the positions of the model are 0 to 29"),
        (torch.tensor([[1], [1]]), torch.tensor([0]), "start has the shape"),
        (torch.tensor([[1], [1]]), 0, "start is int"),
    ):
        with pytest.raises(ValueError, match=message):
            pairs.extend(ids, start, state)
        with pytest.raises(ValueError, match=message):
            pairs.extend(ids=ids, start=start, state=state)
    for bad in (None, {}, [1, 2], ()):
        with pytest.raises(ValueError, match="the state must be a result of encode"):
            pairs.extend(torch.tensor([[1], [1]]), zero, bad)
    result = pairs.extend(torch.tensor([[1], [1]]), zero, state)
    again = Unchecked(pairs).extend(torch.tensor([[1], [1]]), zero, Unchecked(pairs).encode(ROWS))
    assert torch.equal(result, again)


@torch.no_grad()
def test_sides_that_do_not_belong_together(pairs: Any) -> None:
    with pytest.raises(ValueError, match=r"target has the shape \[1, 3\], and B is 2"):
        pairs.score(ROWS, ROWS[:1])


@torch.no_grad()
def test_a_model_of_text_looks_too(tmp_path: Path) -> None:
    model = checked(spec_data((ATTENTION, MLP), fuse=()), tmp_path)
    ids, cache = torch.tensor([[1, 2, 3]]), model.new_cache(1, 8)
    assert model.prefill(ids, torch.tensor(0), cache).shape[0] == 1
    with pytest.raises(ValueError, match="the vocabulary has ids"):
        model.decode(torch.tensor([[100_000]]), torch.tensor(3), cache)
    with pytest.raises(ValueError, match="the state has 1 rows"):
        model.decode(torch.tensor([[1], [2]]), torch.tensor(3), cache)


@pytest.mark.gpu
@torch.no_grad()
def test_a_step_does_not_wait_for_a_gpu(tmp_path: Path) -> None:
    data = {**data_of(LSTM), "targets": ["sm90", "sm86"]}
    loaded = instantiate(spec_of(data), "sm86", tmp_path)
    initialize(loaded, 1)
    model: Any = loaded.model.cuda().eval()
    check_programs(model, loaded.programs, 31)
    state, ids, start = model.encode(ROWS.cuda()), torch.ones(2, 1, dtype=torch.int64).cuda(), torch.tensor(0).cuda()
    model.extend(ids, start, state)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.extend(ids, start, state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
