"""Models that fuse attention: loss and gradients of their references, and no leak."""

from pathlib import Path

import pytest
import torch
from test_attention import GROUPED, POINT, spec
from tiny_models import MLP, Pair, float64, pair, spec_data, spec_of

from specc.compiler import pipeline
from specc.runtime.model.load import group_function, import_model
from specc.runtime.verify.verify import verify


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    norm = {"blocks.*.attention": ["q.norm", "q.rope", "q.gain"]}
    with float64():
        return pair(spec(POINT, norm), tmp_path_factory.mktemp("attention"))


def test_the_model_has_the_loss_and_gradients_of_its_reference(fused: Pair) -> None:
    ids, targets = fused.batch()
    with float64():
        loss = fused.model(ids, targets)
        loss.backward()
        wanted = fused.reference("train", ids=ids, targets=targets)["loss"]
        gradients = torch.autograd.grad(wanted, list(fused.params.values()))
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    results = dict(fused.model.named_parameters())
    for name, want in zip(fused.params, gradients, strict=True):
        torch.testing.assert_close(results[name].grad, want, rtol=1e-8, atol=1e-10)


def test_nothing_before_a_changed_token_moves(fused: Pair) -> None:
    ids, targets = fused.batch()
    with float64(), torch.no_grad():
        before = fused.model.score(ids, targets)
        for j in range(ids.shape[1]):
            changed = ids.clone()
            changed[:, j] = (changed[:, j] + 1) % fused.spec.model.vocabulary
            moved = (fused.model.score(changed, targets) != before).any(0)
            assert not moved[:j].any() and moved[j:].all()


def test_no_gradient_reaches_a_later_token(tmp_path: Path) -> None:
    """Of what a token gives, in the gradients of q, k and v that the group's own backward makes."""
    with float64():
        loaded = pair(spec(), tmp_path)
    (group,) = loaded.programs.groups
    function = group_function(import_model(tmp_path / "fused/cpu"), loaded.programs, group)
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(2, 7, heads, 8, generator=generator, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)
    )
    for j in range(7):
        y = function(q, k, v)
        dq, dk, dv = torch.autograd.grad(y[:, j].square().sum(), (q, k, v))
        assert not dq[:, :j].any() and not dq[:, j + 1 :].any()
        assert not dk[:, j + 1 :].any() and not dv[:, j + 1 :].any() and dv[:, : j + 1].all()


def test_verify_holds_it_to_its_witnesses() -> None:
    checks = {check.name: check for check in verify(spec(), ("cpu",))}
    assert all(check.ok for check in checks.values()), checks
    assert {"kernel causal_attention__h4_g2_c8", "kernel causal_attention_grad__h4_g2_c8"} <= checks.keys()


def test_a_spec_may_take_it_by_an_override() -> None:
    data = spec_data(layers=(GROUPED, MLP), fuse=(), dim=32)
    assert pipeline.run(spec_of({**data, "fuse": [POINT]}), "cpu").groups == pipeline.run(spec(), "cpu").groups
