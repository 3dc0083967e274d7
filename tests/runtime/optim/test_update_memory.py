"""What an update allocates at once is at most what the forecast of memory expects of its kind of optimizer."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from specc.compiler.spec.optimizers.lion import LionSpec
from specc.compiler.spec.optimizers.muon import MuonSpec
from specc.compiler.spec.optimizers.optimizer import OptimizerSpec
from specc.compiler.spec.optimizers.sign import SignSpec
from specc.runtime.bench.dry_run import _peak
from specc.runtime.optim.optimizers import Optimizers
from specc.runtime.optim.schedule import Moment

SHAPES = ((256, 128), (256, 128), (256, 128), (128, 512))
SPECS: dict[str, OptimizerSpec] = {
    "muon": MuonSpec(kind="muon", match="*", lr=0.02),
    "normuon": MuonSpec(kind="muon", match="*", lr=0.02, second_moment=0.95),
    "lion": LionSpec(kind="lion", match="*", lr=0.02),
    "cautious lion": LionSpec(kind="lion", match="*", lr=0.02, weight_decay=0.1, cautious_decay=True),
    "sign": SignSpec(kind="sign", match="*", lr=0.02),
}


@pytest.mark.parametrize("name", SPECS)
def test_an_update_allocates_at_most_what_is_expected(name: str, tmp_path: Path) -> None:
    """Products are in f32 on the CPU, so that Muon's matrices take half as much again as on a GPU."""
    spec = SPECS[name]
    masters = {f"w{i}": nn.Parameter(torch.randn(shape)) for i, shape in enumerate(SHAPES)}
    for master in masters.values():
        master.grad = torch.randn_like(master)
    optimizers = Optimizers(masters, (spec,))
    optimizers.set(Moment(step=1))
    work = optimizers.work(1)
    optimizers.update(work)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        optimizers.update(work)
    recorded.export_chrome_trace(str(trace := tmp_path / "trace.json"))
    expected, peak = 4 * spec.update_numbers(SHAPES), _peak(trace)
    assert 0.4 * expected < peak <= 1.6 * expected
