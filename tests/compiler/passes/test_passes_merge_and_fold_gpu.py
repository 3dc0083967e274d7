"""Merged linear layers and folded factors on a GPU: kernels read parts of one product, and compiled steps agree."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import spec_data, spec_of

from specc.compiler.spec.spec import Spec
from specc.runtime.model.load import choose_target, initialize, instantiate
from specc.runtime.verify.verify import verify

pytestmark = pytest.mark.gpu

VECTOR = {"learn": {"residual": {"init": 0.5}}, "write": "x + residual * y"}
ATTENTION = {"kind": "attention", "heads": 4, "kv_heads": 2, "rope": {"base": 10000}, "qk_norm": {"gain": 1.5}}
MLP = {"kind": "mlp", "hidden": 512, "act": "relu(x) ** 2"}
POINTS: tuple[Mapping[str, Any], ...] = (
    {"blocks.*.attention": ["y"]},
    {"blocks.*.attention": ["q.norm", "q.rope", "q.gain"]},
    {"blocks.*.attention": ["k.norm", "k.rope"]},
    {"blocks.*.mlp": ["up", "act", "down"]},
)


def spec(rewritten: bool, **attention: Any) -> Spec:
    layers = {**ATTENTION, **VECTOR, **attention}, {**MLP, **VECTOR}
    data = spec_data(layers, POINTS, ("sm80", "sm90"), vocab=512, dim=256, context=256)
    patterns = ["*"] if rewritten else []
    return spec_of({**data, "merge": patterns, "fold": patterns})


@pytest.mark.parametrize("attention", [{}, {"exclude": {}}, {"mask": "j <= i and i - j < 64"}], ids=str)
def test_every_check_of_verify(attention: dict[str, Any]) -> None:
    case = spec(True, **attention)
    checks = list(verify(case, (choose_target(case, None),)))
    assert checks and [(check.name, check.detail) for check in checks if not check.ok] == []


@pytest.mark.parametrize("attention", [{}, {"exclude": {}}, {"mask": "j <= i and i - j < 64"}], ids=str)
def test_compiled_steps_agree_with_separate_layers(attention: dict[str, Any], tmp_path: Path) -> None:
    """torch.compile, as in training: the loss and all gradients differ by the rounding of bf16 at most."""
    ids = torch.randint(512, (4, 256), generator=torch.Generator().manual_seed(0)).cuda()
    results = []
    for rewritten in (True, False):
        torch.compiler.reset()
        case = spec(rewritten, **attention)
        loaded = instantiate(case, choose_target(case, None), tmp_path / str(rewritten))
        initialize(loaded, 1)
        model = loaded.model.to("cuda", torch.bfloat16)
        loss = torch.compile(model, fullgraph=True)(ids, ids.roll(-1, 1))
        loss.backward()
        results.append((loss.item(), {name: value.grad.float() for name, value in model.named_parameters()}))
    (loss, gradients), (want, expected) = results
    assert loss == pytest.approx(want, rel=1e-3)
    for name, value in expected.items():
        assert value.norm() > 0, name
        if value.dim() == 2 and value.numel() > 64:  # sums of few numbers cancel
            assert (gradients[name] - value).norm() <= 0.1 * value.norm(), name
