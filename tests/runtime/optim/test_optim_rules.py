"""Each update rule against a loop over one matrix in float64, with the options that all rules share."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import train_spec, trainer

from specc.compiler.spec.optimizers.optimizer import OptimizerSpec
from specc.compiler.spec.train import OPTIMIZERS, TrainSpec
from specc.runtime.optim.masters import Masters
from specc.runtime.optim.optimizers import Optimizers, rule_of, unclipped_parameters
from specc.runtime.optim.schedule import Moment
from specc.runtime.storage import checkpoint

STEPS = 50
SHAPES = {"a": (6, 6), "b": (6, 6), "tall": (9, 4), "wide": (4, 9)}
QUINTICS = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (2.8366, -3.0525, 1.2012))
State = dict[str, Any]


def adamw(g: Tensor, state: State) -> Tensor:
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    v = state["v"] = 0.95 * state.get("v", 0) + 0.05 * g * g
    return (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)


def lion(g: Tensor, state: State) -> Tensor:
    m = state.get("m", torch.zeros_like(g))
    state["m"] = 0.99 * m + 0.01 * g
    return torch.sign(0.9 * m + 0.1 * g)


def sign(g: Tensor, state: State) -> Tensor:
    return torch.sign(g)


def muon(g: Tensor, state: State) -> Tensor:
    """Nesterov momentum of 0.9, five iterations of three quintics, the last repeated, on the singular values."""
    m = state["m"] = 0.9 * state.get("m", 0) + g
    u, s, v = torch.linalg.svd(g + 0.9 * m, full_matrices=False)
    s = s / (s.norm() + 1e-7)
    for a, b, c in [*QUINTICS, QUINTICS[-1], QUINTICS[-1]]:
        s = a * s + b * s**3 + c * s**5
    return math.sqrt(max(1, g.shape[0] / g.shape[1])) * (u * s) @ v


def soap(g: Tensor, state: State) -> Tensor:
    """Algorithm 3 of Vyas et al. with bases of sides up to 6, refreshed every 4 updates: one power iteration and QR,
    with eigenvectors sorted by their eigenvalues as in the authors' code, which skips the first update."""
    sides = [side for side in (0, 1) if g.shape[side] <= 6]
    for side in sides:
        product = g @ g.T if side == 0 else g.T @ g
        state["gram", side] = 0.95 * state.get(("gram", side), 0) + 0.05 * product
    if "t" not in state:
        state["t"], state["m"], state["v"] = 0, torch.zeros_like(g), torch.zeros_like(g)
        for side in sides:
            state["basis", side] = torch.linalg.eigh(state["gram", side])[1]
        return torch.zeros_like(g)

    def into(x: Tensor) -> Tensor:
        x = state["basis", 0].T @ x if 0 in sides else x
        return x @ state["basis", 1] if 1 in sides else x

    t = state["t"] = state["t"] + 1
    state["m"] = 0.95 * state["m"] + 0.05 * g
    state["v"] = 0.95 * state["v"] + 0.05 * into(g) ** 2
    n = math.sqrt(1 - 0.95**t) / (1 - 0.95**t) * into(state["m"]) / (state["v"].sqrt() + 1e-8)
    n = state["basis", 0] @ n if 0 in sides else n
    n = n @ state["basis", 1].T if 1 in sides else n
    if t % 4 == 0:
        for side in sides:
            gram, basis = state["gram", side], state["basis", side]
            order = torch.argsort((basis.T @ gram @ basis).diag(), descending=True)
            state["v"] = state["v"].index_select(side, order)
            state["basis", side] = torch.linalg.qr(gram @ basis[:, order])[0]
    return n


RULES: dict[str, tuple[Callable[[Tensor, State], Tensor], dict[str, Any]]] = {
    "adamw": (adamw, {}),
    "lion": (lion, {}),
    "muon": (muon, {"momentum": 0.9, "coefficients": QUINTICS}),
    "sign": (sign, {}),
    "soap": (soap, {"basis_every": 4, "largest_side": 6}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decayed": {"weight_decay": 0.5},
    "cautious, every third": {"weight_decay": 0.5, "cautious_decay": True, "every": 3},
}


def specs(*entries: dict[str, Any]) -> tuple[OptimizerSpec, ...]:
    optimizers = tuple({"match": "*", "lr": 0.01, **entry} for entry in entries)
    return TrainSpec.model_validate({"tokens_per_step": 8, "steps": STEPS, "optimizers": optimizers}).optimizers


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient(name: str, step: int) -> Tensor:
    return random(*SHAPES[name], seed=1000 * list(SHAPES).index(name) + step)


def multiplier(step: int) -> float:
    return 1 / (1 + step / 20)


def begun() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(random(*shape, seed=i)) for i, (name, shape) in enumerate(SHAPES.items())}


def reference(name: str, kind: str, options: dict[str, Any]) -> Tensor:
    direction, state, total = RULES[kind][0], State(), torch.zeros(SHAPES[name], dtype=torch.float64)
    weight, every = begun()[name].detach(), options.get("every", 1)
    for step in range(STEPS):
        total = total + gradient(name, step)
        if (step + 1) % every:
            continue
        update = direction(total / every, state)
        total = torch.zeros_like(total)
        if kind == "soap" and state["t"] == 0:
            continue
        lr, decay = 0.01 * multiplier(step), options.get("weight_decay", 0.0)
        decays = (update * weight >= 0).double() if options.get("cautious_decay") else 1.0
        weight = weight - lr * (update + decay * decays * weight)
    return weight


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", RULES)
def test_fifty_steps_are_the_papers_also_after_resuming(kind: str, options: dict[str, Any]) -> None:
    """The state moves to new optimizers between two updates, also where sums of gradients are part of it."""
    entry = {"kind": kind, **RULES[kind][1], **options}
    weights = {resumes: begun() for resumes in (False, True)}
    for resumes, params in weights.items():
        optimizers = Optimizers(params, specs(entry))
        for step in range(STEPS):
            if resumes and step == 26:
                state = {name: tensor.clone() for name, tensor in optimizers.state().items()}
                optimizers = Optimizers(params, specs(entry))
                optimizers.restore(state)
            for name, param in params.items():
                param.grad = gradient(name, step)
            optimizers.set(Moment(multiplier(step), done=step / STEPS, step=step))
            optimizers.update(optimizers.work(step))
    for name in SHAPES:
        assert torch.equal(weights[False][name], weights[True][name])
        torch.testing.assert_close(weights[False][name].detach(), reference(name, kind, options), rtol=0, atol=1e-8)


@pytest.mark.parametrize("left_out", ["nothing", "gradient_count"])
def test_a_run_resumes_bit_for_bit_between_two_updates(left_out: str, tmp_path: Path) -> None:
    """From a checkpoint, with sums of gradients and bases of SOAP in it; parameters have their state by name. Older
    checkpoints lack the number of summed gradients."""
    soap = {"kind": "soap", "match": "blocks.{up,down}", "lr": 0.01, "basis_every": 2}
    lion = {"kind": "lion", "match": "*", "lr": 0.01, "every": 2, "weight_decay": 0.1, "cautious_decay": True}
    train = train_spec(optimizers=(soap, lion))
    whole, first, second = (trainer(tmp_path, train) for _ in range(3))
    for run, steps in ((whole, 8), (first, 5)):
        torch.manual_seed(train.seed)
        for _ in range(steps):
            run.advance()
    snapshot = first.snapshot()
    without = {name: tensor for name, tensor in snapshot.optimizer.items() if left_out not in name}
    path = checkpoint.save(tmp_path / "checkpoints", replace(snapshot, optimizer=without))
    second.restore(checkpoint.load(path))
    for _ in range(3):
        second.advance()
    state = second.optimizers.state()
    assert {"soap.left_basis/blocks.up", "lion.gradient_sum/embed", "lion.momentum/blocks.gain"} <= state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in whole.optimizers.state().items())
    assert all(torch.equal(tensor, second.masters.tensors[name]) for name, tensor in whole.masters.tensors.items())


def test_a_warm_up_runs_each_work_and_changes_nothing(tmp_path: Path) -> None:
    """So that all that a run launches is compiled before its clock starts."""
    entries = ({"kind": "soap", "match": "blocks.up", "lr": 0.01, "basis_every": 4, "every": 2},)
    rest = {"kind": "adamw", "match": "*", "lr": 0.01, "every": 3}
    run, other = (trainer(tmp_path, train_spec(optimizers=(*entries, rest))) for _ in range(2))
    torch.manual_seed(0)
    run.warm_up(257)
    works = {work for _, work in run._updates}
    assert works == {run.optimizers.work(step) for step in range(20)} and len(works) > 4
    torch.manual_seed(0)
    assert all(torch.equal(tensor, other.masters.tensors[name]) for name, tensor in run.masters.tensors.items())
    assert run.optimizers.waits(("begin", "update")) and not run.optimizers.waits(("sum", "update"))


def test_every_optimizer_has_a_reference() -> None:
    assert {spec.model_fields["kind"].annotation.__args__[0] for spec in OPTIMIZERS.models} == set(RULES)


def test_signs_are_not_in_the_norm() -> None:
    """The gradient of a router's bias is a load. It changes neither the norm nor with it."""
    model = nn.ParameterDict({"up": torch.zeros(2, 2), "bias": torch.zeros(3), "gain": torch.zeros(1)})
    shapes = {name: tuple(param.shape) for name, param in model.items()}
    entries = specs({"kind": "sign", "match": "bias"}, {"kind": "lion"})
    assert not any(rule_of(entry).sharded for entry in entries if not entry.in_norm)
    masters = Masters(model, dict.fromkeys(shapes, torch.float32), unclipped=unclipped_parameters(shapes, entries))
    masters.clear()
    for name, value in (("up", 2.0), ("bias", 100.0), ("gain", 3.0)):
        masters.model_parameters[name].grad = torch.full(shapes[name], value)
    masters.collect()
    masters.loss.fill_(7)
    norm = masters.finish(1, clip_norm=1.0)
    assert float(norm) == pytest.approx(5.0)
    clipped = {name: master.grad for name, master in masters.tensors.items()}
    assert float(clipped["bias"][0]) == 100 and float(masters.loss) == 7  # type: ignore[index]
    assert float(clipped["gain"]) == pytest.approx(0.6, rel=1e-5)  # type: ignore[arg-type]
