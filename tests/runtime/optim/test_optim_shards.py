"""Muon's matrices shared out among processes: the same weights as those of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import outputs
from shard_scene import VARIANTS


def world(size: int, device: str, folder: Path) -> list[dict[str, Any]]:
    """The output of each rank."""
    ended = outputs("shard_scene.py", size, folder, device)
    for _, out, err in ended:
        assert out.startswith("{"), err
    return [json.loads(out) for _, out, _ in ended]


def test_sharding_is_as_one_process_to_rounding(tmp_path: Path) -> None:
    """Several shapes, one of them a single matrix; momentum, rate, decay and clipping change from step to step, and
    after three steps all goes on from what one rank has saved. In bf16 a gradient is rounded before it is added, on
    both sides alike."""
    seen = world(4, "cpu", tmp_path)
    assert all(rank.keys() == seen[0].keys() and len(rank) == 2 * len(VARIANTS) for rank in seen)
    for rank in seen:
        for name, result in rank.items():
            assert result["names"] and result["padding"] > 1, name
            assert result["norm"] < 1e-5, name
            # weights are about 1 and five steps of up to 0.1 were made; f32 has 6e-8, which bases of gradients amplify
            limit = 2e-4 if name.startswith("soap") else 2e-5
            assert result["weights"] < limit and result["state"] < limit, (name, result)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_sharding_over_nccl_is_as_one_gpu(tmp_path: Path) -> None:
    """Products are in bf16 there, and may take another order for another number of matrices: a direction, of length 1
    in each singular vector, is off by up to a few of its 2^-9, five times at a rate of 0.1. Ranks agree to the bit."""
    for rank in world(2, "cuda", tmp_path):
        assert len(rank) == 2 * len(VARIANTS)
        for name, result in rank.items():
            assert result["names"] and result["norm"] < 1e-5, name
            assert result["weights"] < 0.01 and result["state"] < 0.01, (name, result)
