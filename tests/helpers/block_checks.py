"""Checks of a block in each case: generated code against float64 references, fused and with `fuse: []`."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_models import ATTENTION, MLP, Pair, float64, pair, tiny

from specc.compiler.programs import fx_witness as witness
from specc.compiler.programs.programs import flatten
from specc.compiler.spec.spec import Spec
from specc.runtime.distributed.world import World
from specc.runtime.train.dropout_draws import DropoutDraws

ROOT = Path(__file__).parents[2]
NORM_ROPE = ({"blocks.*.attention": ["q.norm", "q.rope", "q.gain"]}, {"blocks.*.attention": ["k.norm", "k.rope"]})


def attention(**options: Any) -> dict[str, Any]:
    return {"layers": ({**ATTENTION, **options}, MLP)}


def mlp(act: Any = MLP["act"], **options: Any) -> dict[str, Any]:
    return {"layers": (ATTENTION, {**MLP, "act": act, **options})}


def check_block(case: Mapping[str, Any], folder: Path) -> None:
    """Checks the model of `tiny(**case)` in every way; with `fuse: []` too where the case has fusion points of its own.

    Elsewhere the fusion points are those of the MLP, which a case without `fuse` does not change.
    """
    check_spec(tiny(**case), folder, (True, False) if case.get("fuse") else (True,))


def check_spec(spec: Spec, folder: Path, fused: Sequence[bool] = (True, False)) -> None:
    """Checks the model of a spec in every way, with its fusion points where `fused`, else without them."""
    for fuse in fused:
        sample = pair(spec, folder, fuse)
        with float64():
            loss_and_all_gradients_equal_the_reference(sample)
            with torch.no_grad():
                scores_are_causal_and_equal_the_reference(sample)
                cached_logits_equal_the_uncached(sample)
        torch_fx_finds_the_plan(sample)
    from ruff import find_ruff_bin  # not at the top: a machine that runs only the tests of a GPU may not have it

    settings = ["--config", str(ROOT / "generated/ruff.toml"), "--ignore", "E501"]  # names of values may be long
    command = [find_ruff_bin(), "check", "--no-cache", *settings, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def loss_and_all_gradients_equal_the_reference(sample: Pair) -> None:
    ids, targets = sample.batch()
    DropoutDraws(sample.model, 7, *ids.shape, World.alone()).write(5, 2)
    want = sample.reference("train", ids=ids, targets=targets)["loss"]
    gradients = dict(zip(sample.params, torch.autograd.grad(want, list(sample.params.values())), strict=True))
    loss = sample.model(ids, targets)
    loss.backward()
    torch.testing.assert_close(loss, want, rtol=1e-11, atol=1e-11)
    for name, parameter in sample.model.named_parameters():
        blind = sample.spec.name == "blind" and name.endswith((".q", ".k"))
        assert (gradients[name].abs().max() > 0) != blind, f"the gradient of {name} tests nothing"
        torch.testing.assert_close(
            parameter.grad, gradients[name], rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


def scores_are_causal_and_equal_the_reference(sample: Pair) -> None:
    ids, targets = sample.batch()
    scores = sample.model.score(ids, targets)
    want = sample.reference("score", ids=ids, targets=targets)["loss"]
    torch.testing.assert_close(scores, want, rtol=1e-11, atol=1e-11)
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % sample.spec.model.vocabulary
    moved = (sample.model.score(changed, targets) - scores).abs()
    # the products of an expert round a row by the number of its rows
    assert moved[:, :5].max() <= (1e-12 if "moe" in str(sample.spec.model) else 0)
    assert moved[:, 5].min() > 0


def cached_logits_equal_the_uncached(sample: Pair) -> None:
    ids, _ = sample.batch()
    rows, tokens = ids.shape
    cache = sample.model.new_cache(rows, tokens + 3)
    for state in cache:
        for tensor in state:
            tensor.fill_(1e6)  # rows that are not written yet must not be read
    logits = [sample.model.prefill(ids[:, :5], torch.tensor(0), cache)]
    logits.append(sample.model.prefill(ids[:, 5:8], torch.tensor(5), cache))
    logits += [sample.model.decode(ids[:, i : i + 1], torch.tensor(i), cache) for i in range(8, tokens)]
    result = torch.stack([row.log_softmax(-1) for row in logits], dim=1)
    ends = torch.tensor([4, 7, *range(8, tokens)])
    vocab = sample.spec.model.vocabulary
    targets = torch.arange(vocab).repeat_interleave(rows)[:, None].expand(-1, tokens)
    nats = sample.model.score(ids.repeat(vocab, 1), targets).unflatten(0, (vocab, rows))[..., ends]
    torch.testing.assert_close(-result[..., :vocab], nats.permute(1, 2, 0), rtol=1e-9, atol=1e-10)


def torch_fx_finds_the_plan(sample: Pair) -> None:
    source = sys.modules[type(sample.model).__module__]
    early = [(name, name) for phase in sample.programs.phases for name in (phase.train, phase.score)]
    for program, method in (("train", "forward"), ("score", "score"), *early):
        traced = witness.trace(sample.model, source, method)
        nodes = flatten(sample.programs, sample.programs.program(program), groups=False).nodes
        assert witness.round_trip(sample.programs, program, traced) == len(nodes)
