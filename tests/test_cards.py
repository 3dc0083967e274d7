"""GPU tests that share cards: which card a process has, how much of its memory, and which tests are left out."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import cards
import pytest
import torch
from cards import LIMIT, gigabytes_of, memory_limit, memory_of_one_test, use_card_of_worker
from gpus import gpu_target, skip_without_e4m3


@pytest.mark.parametrize(
    ("visible", "worker", "wanted"),
    [("0,1,2", "gw0", "0"), ("0,1,2", "gw4", "1"), ("GPU-a, GPU-b", "gw3", "GPU-b"), ("2", "gw1", "2"),
     ("", "gw1", ""), ("0,1", "", "0,1"), ("0,1", "master", "0,1")],
)  # fmt: skip
def test_processes_take_cards_in_turn(visible: str, worker: str, wanted: str) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": visible, "PYTEST_XDIST_WORKER": worker}
    use_card_of_worker(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == wanted


def test_the_driver_lists_the_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "GPU-one\nGPU-two"\n')
    tool.chmod(0o755)
    monkeypatch.setattr(cards, "CARDS", (str(tool), *cards.CARDS[1:]))
    environment = {"PYTEST_XDIST_WORKER": "gw5"}
    use_card_of_worker(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-two"
    tool.write_text("#!/bin/sh\nexit 9\n")
    environment = {"PYTEST_XDIST_WORKER": "gw5"}
    use_card_of_worker(environment)
    assert "CUDA_VISIBLE_DEVICES" not in environment


def test_the_limit_is_a_number_of_gigabytes() -> None:
    assert memory_limit({}) is None and memory_limit({LIMIT: "12.5"}) == 12.5
    for text in ("many", "0", "-1", "nan", "inf"):
        with pytest.raises(pytest.UsageError, match=f"{LIMIT} is '{text}'; expected gigabytes"):
            memory_limit({LIMIT: text})


def test_a_test_has_the_limit_and_leaves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float | str] = []
    device = SimpleNamespace(total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", calls.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    for reserved, limit, wanted in ((0, None, []), (1 << 30, None, ["emptied"]), (1 << 30, 20.0, [0.25, "emptied"])):
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda reserved=reserved: reserved)
        calls.clear()
        with memory_of_one_test(limit):
            assert calls == wanted[: limit is not None]
        assert calls == wanted


def test_large_tests_say_so(request: pytest.FixtureRequest) -> None:
    item = request.node
    assert gigabytes_of(item) == 0
    item.add_marker(pytest.mark.gpu)
    assert gigabytes_of(item) == cards.USUAL
    item.add_marker(pytest.mark.gpu(gigabytes=40))
    assert gigabytes_of(item) == 40


@pytest.mark.parametrize(
    ("capability", "target", "rounds"),
    [((8, 0), "sm80", False), ((8, 6), "sm86", False), ((8, 9), "sm89", True), ((9, 0), "sm90", True),
     ((12, 0), "sm120", True)],
)  # fmt: skip
def test_a_card_has_the_newest_target_that_it_runs(
    capability: tuple[int, int], target: str, rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert gpu_target() == target
    with nullcontext() if rounds else pytest.raises(pytest.skip.Exception, match="has no e4m3"):
        skip_without_e4m3(target)
