"""Inputs of other dtypes than the model's: routers in f32, and the integers from which dropout draws."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pair_models import CROSS, EMBED, MLP, SELF, blocks, pairs_data
from tiny_models import ATTENTION, spec_of, tiny

from specc.runtime.model.load import instantiate
from specc.runtime.verify import verify as module
from specc.runtime.verify.verify import verify

MOE = {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 16, "act": "silu(gate) * x"}


def experts(target: str) -> Any:
    return tiny((ATTENTION, MOE), (), targets=[target], dim=32)


def test_a_router_stays_in_f32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = instantiate(experts("sm90"), "sm90", tmp_path, fuse=False)
    monkeypatch.setattr(module, "device_of", lambda _: torch.device("cpu"))
    module._fill(loaded, loaded)
    dtypes = {name: parameter.dtype for name, parameter in loaded.model.named_parameters()}
    assert dtypes["blocks.0.moe.router"] == torch.float32 and dtypes["blocks.0.moe.up"] == torch.bfloat16


def test_a_product_that_draws_dropout_is_verified() -> None:
    mlp = {"kind": "mlp", "ratio": 2, "act": "gelu(x)", "dropout": 0.25}
    fuse = [{"blocks.*.mlp": ["up", "act", "down", "dropped", "x"]}]
    checks = list(verify(tiny((ATTENTION, mlp), fuse, targets=["cpu"], dim=32), ("cpu",)))
    drawn = [check for check in checks if "dropout" in check.name]
    assert drawn and all(check.ok for check in checks), checks


def test_a_trace_has_the_rounded_sinusoids_of_the_plan() -> None:
    """The sum of the embedding and the sinusoids casts its inputs too."""
    stages = [{**EMBED, "positions": "sinusoidal"}, blocks(SELF, MLP)]
    data = pairs_data(stages, [stages[0], blocks(SELF, CROSS, MLP)])
    checks = [check for check in verify(spec_of({**data, "targets": ["sm90"]}), ("sm90",)) if check.name[:2] == "fx"]
    assert checks and all(check.ok for check in checks), checks


@pytest.mark.gpu
def test_experts_are_verified_on_a_gpu() -> None:
    checks = list(verify(experts("sm90"), ("sm90",)))
    assert all(check.ok for check in checks), [check for check in checks if not check.ok]
