"""The two halves of `score`: made where a spec asks for them, for any decoder, and together what `score` is."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FUSE_MLP, float64, pair, spec_data, spec_of

from specc.compiler import pipeline
from specc.compiler.build import compile_loaded
from specc.compiler.catalog import models
from specc.compiler.programs import fx_witness as witness
from specc.compiler.programs.programs import flatten
from specc.compiler.spec import adapt
from specc.compiler.spec.adapt.adaptation import Adaptation
from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec
from specc.runtime.model.load import instantiate

ROOT = Path(__file__).parents[3]
FUSE_HEAD: dict[str, Any] = {"head": ["logits", "softcap", "loss"]}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap, fused head": {"head": {"softcap": 15}, "fuse": (FUSE_MLP, FUSE_HEAD)},
    "its own head, with a bias": {"head": {"tied": False, "bias": True}},
    "narrow table": {"embed": [{"kind": "token", "dim": 4}, {"kind": "project"}], "head": {"tied": False}},
    "smear, bigram": {"embed": [{"kind": "token"}, {"kind": "bigram", "buckets": 13, "dim": 4}, {"kind": "smear"}]},
}


def with_halves(name: str) -> Spec:
    return spec_of({**spec_data(**MODELS[name]), "eval": {"adapt": {"kind": "slot"}}})


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_one_after_the_other_they_are_the_score(name: str, fuse: bool, tmp_path: Path) -> None:
    with float64():
        sample = pair(with_halves(name), tmp_path, fuse)
        ids, targets = sample.batch()
        with torch.no_grad():
            x = sample.model.features(ids)
            assert x.shape == (*ids.shape, 8)
            want = sample.reference("score", ids=ids, targets=targets)["loss"]
            torch.testing.assert_close(sample.model.nats(x, targets), want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_pass_through_both(name: str, fuse: bool, tmp_path: Path) -> None:
    """Those of the features and of every parameter, against the reference's."""
    with float64():
        sample = pair(with_halves(name), tmp_path, fuse)
        ids, targets = sample.batch()
        weight = torch.linspace(0.1, 2, ids.numel()).reshape(ids.shape)
        x = sample.model.features(ids)
        free = x.detach().requires_grad_()
        (result,) = torch.autograd.grad((sample.model.nats(free, targets) * weight).sum(), free)
        with torch.no_grad():
            up, down = (sample.model.nats(free + step * result, targets) * weight for step in (1e-6, -1e-6))
            assert float((up - down).sum()) / 2e-6 == pytest.approx(float((result * result).sum()), rel=1e-6)
        parameters = dict(sample.model.named_parameters())
        loss = (sample.model.nats(x, targets) * weight).sum()
        grads = torch.autograd.grad(loss, list(parameters.values()))
        want = (sample.reference("score", ids=ids, targets=targets)["loss"] * weight).sum()
        wanted = torch.autograd.grad(want, [sample.params[key] for key in parameters])
        for key, have, exact in zip(parameters, grads, wanted, strict=True):
            torch.testing.assert_close(have, exact, rtol=1e-8, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ["gpt_mlp35", "gpt_mini"])
def test_only_a_spec_that_adapts_has_them_and_fx_finds_them(name: str, tmp_path: Path) -> None:
    path = ROOT / "specs" / f"{name}.yaml"
    plain, asking = (load(path, over)[0] for over in ((), ("eval.adapt={kind: ttt}",)))
    assert [p.name for p in pipeline.lower(plain, "cpu").programs] == ["train", "score", "prefill", "decode"]
    before, after = (compile_loaded(spec, None, ("cpu",)).files for spec in (plain, asking))
    expected = {key: text for key, text in after.items() if key.startswith("cpu/") and key != "cpu/model.py"}
    assert expected == {key: text for key, text in before.items() if key.startswith("cpu/") and key != "cpu/model.py"}
    lines = after["cpu/model.py"].splitlines()
    start = next(i for i, line in enumerate(lines) if "def nats(" in line)
    end = next(i for i, line in enumerate(lines) if "def features(" in line)
    assert "\n".join(lines[:start] + lines[end:]) + "\n" == before["cpu/model.py"]
    loaded = instantiate(asking, "cpu", tmp_path)
    source = sys.modules[type(loaded.model).__module__]
    for program in ("features", "nats"):
        traced = witness.trace(loaded.model, source, program)
        nodes = flatten(loaded.programs, loaded.programs.program(program), groups=False).nodes
        assert witness.round_trip(loaded.programs, program, traced) == len(nodes)
        assert witness.check_types(loaded.programs, program, traced, loaded.model, 2, 16) >= len(nodes) - 1


@pytest.mark.parametrize("settings", models(adapt, Adaptation, "kind"))
def test_each_way_to_adapt_says_whether_it_is_causal(settings: type[Adaptation]) -> None:
    from specc.runtime.eval.adapt.method import method_of

    kind = settings.model_fields["kind"].annotation.__args__[0]  # type: ignore[union-attr]
    assert isinstance(settings.causal, bool) and bool(settings.leaks) != settings.causal
    assert method_of(settings(kind=kind)).name == kind
