"""Muon's matrices shared out among processes: the same weights as those of one process."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from ranks import environment
from run_samples import HELPERS
from shard_scene import VARIANTS

from specc.runtime.distributed import launch


def world(size: int, device: str) -> list[dict[str, Any]]:
    """The output of each rank."""
    command = [sys.executable, str(HELPERS / "shard_scene.py"), device]
    processes = []
    with launch._reserved_port() as port:
        for rank in map(str, range(size)):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen(command, env=environment(**place, **where), **pipes))
        outputs = [process.communicate(timeout=300) for process in processes]
    for out, err in outputs:
        assert out.startswith("{"), err
    return [json.loads(out) for out, _ in outputs]


def test_sharding_is_as_one_process_to_rounding() -> None:
    """Several shapes, one of them a single matrix; momentum, rate, decay and clipping change from step to step, and
    after three steps all goes on from what one rank has saved. In bf16 a gradient is rounded before it is added, on
    both sides alike."""
    seen = world(4, "cpu")
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
def test_sharding_over_nccl_is_as_one_gpu() -> None:
    """Products are in bf16 there, and may take another order for another number of matrices: a direction, of length 1
    in each singular vector, is off by up to a few of its 2^-9, five times at a rate of 0.1. Ranks agree to the bit."""
    for rank in world(2, "cuda"):
        assert len(rank) == 2 * len(VARIANTS)
        for name, result in rank.items():
            assert result["names"] and result["norm"] < 1e-5, name
            assert result["weights"] < 0.01 and result["state"] < 0.01, (name, result)
