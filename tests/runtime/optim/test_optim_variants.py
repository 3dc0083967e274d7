"""Variants of Muon, against the formulas of the papers in float64."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from specc.compiler.spec.optimizers.muon import LEAST_STEPS, MuonSpec
from specc.compiler.spec.train import TrainSpec
from specc.runtime.distributed.world import World
from specc.runtime.optim.muon import Muon
from specc.runtime.optim.optimizers import Optimizers
from specc.runtime.optim.orthogonalize import METHODS, POLAR_EXPRESS, TURBO, orthogonalize
from specc.runtime.optim.schedule import Moment
from specc.runtime.optim.update_rule import UPDATE

POLAR = [
    (8.15655, -22.48329, 15.87877),
    (4.04293, -2.80892, 0.50002),
    (3.89167, -2.77248, 0.50606),
    (3.28575, -2.36813, 0.46449),
    (2.34654, -1.70978, 0.42324),
]
AFTER_ROWS = [
    (4.1071, -2.9478, 0.5448),
    (3.9487, -2.9089, 0.5518),
    (3.3184, -2.4885, 0.5100),
    (2.3007, -1.6689, 0.4188),
]
SHAPES = [(8, 8), (16, 8), (8, 16), (31, 7), (7, 31), (1, 5), (64, 48)]


def muon(params: list[nn.Parameter], **settings: Any) -> Muon:
    spec = MuonSpec.model_validate({"kind": "muon", "match": "*", "lr": 0.1, "weight_decay": 0.1, **settings})
    return Muon(spec, {str(i): param for i, param in enumerate(params)}, World.alone())


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def along_singular_values(matrix: Tensor, quintics: list[tuple[float, float, float]]) -> Tensor:
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    for a, b, c in quintics:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


def polar_express(matrix: Tensor, steps: int) -> Tensor:
    quintics = [*POLAR, *[POLAR[-1]] * 20][:steps]
    return along_singular_values(matrix.double() / (matrix.double().norm() + 1e-7), quintics)


def turbo(matrix: Tensor, steps: int) -> Tensor:
    """Row i of the wide matrix over sqrt(sum_j |(X X^T)_ij|), which counts as a step, then the quintics."""
    x = matrix.double().T if matrix.shape[0] > matrix.shape[1] else matrix.double()
    rows = [row / math.sqrt(sum(abs(float(row @ other)) for other in x)) for row in x]
    result = along_singular_values(torch.stack(rows), [*AFTER_ROWS, *[AFTER_ROWS[-1]] * 20][: steps - 1])
    return result.T if matrix.shape[0] > matrix.shape[1] else result


REFERENCES = {"polar_express": polar_express, "turbo": turbo}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["polar_express", "turbo"])
@pytest.mark.parametrize("steps", [1, 4, 5, 7])
def test_a_method_is_its_formula(name: str, shape: tuple[int, int], steps: int) -> None:
    batch = random(3, *shape) * torch.tensor([1e-3, 1.0, 1e4])[:, None, None]
    result = orthogonalize(batch, steps, METHODS[name])
    for orthogonal, matrix in zip(result, batch, strict=True):
        wanted = REFERENCES[name](matrix, steps)
        torch.testing.assert_close(orthogonal.double(), wanted, rtol=0, atol=2e-3 if steps > 5 else 3e-4)


@pytest.mark.parametrize("name", list(METHODS))
def test_methods_take_gradients_of_any_size_and_zeros(name: str) -> None:
    matrix = random(1, 16, 24)
    wanted = orthogonalize(matrix, 4, METHODS[name])
    for size in (1e-3, 1e6, 1e12):
        torch.testing.assert_close(orthogonalize(matrix * size, 4, METHODS[name]), wanted, rtol=0, atol=1e-3)
    assert torch.equal(orthogonalize(torch.zeros(2, 4, 6), 4, METHODS[name]), torch.zeros(2, 4, 6))
    with_zero_row = random(1, 6, 9)
    with_zero_row[0, 2] = 0
    assert bool(orthogonalize(with_zero_row, 4, METHODS[name]).isfinite().all())


@pytest.mark.parametrize(
    ("name", "low", "high"), [("newton_schulz", 0.68, 1.203), ("polar_express", 0.858, 1.142), ("turbo", 0.875, 1.124)]
)
def test_singular_values_end_in_the_band_of_the_method(name: str, low: float, high: float) -> None:
    """The band is that of the published quintics over singular values from 0.01 (a condition of 100) to 1."""
    for shape in ((64, 16), (16, 64), (96, 48), (128, 512)):
        values = torch.linalg.svdvals(orthogonalize(random(4, *shape), 5, METHODS[name]).double())
        assert low < float(values.min()) and float(values.max()) < high, shape


def test_turbo_needs_no_norm() -> None:
    """Almost-orthogonal rows alone bring all singular values to 1 at most."""
    for shape in ((5, 9), (33, 33), (2, 100)):
        x = random(3, *shape) * 40
        scaled, gram = TURBO.prepare(x)
        assert float(torch.linalg.matrix_norm(scaled.double(), ord=2).max()) <= 1 + 1e-6
        torch.testing.assert_close(gram, scaled @ scaled.mT, rtol=1e-5, atol=1e-6)


def test_the_spec_names_the_methods_and_their_published_lengths() -> None:
    def spec(**more: Any) -> MuonSpec:
        return MuonSpec.model_validate({"kind": "muon", "match": "*", "lr": 0.1, **more})

    for name, method in METHODS.items():
        assert spec(method=name).method == method.name == name and spec(method=name).steps == 5
    with pytest.raises(ValidationError):
        spec(method="svd")
    assert len(TURBO.quintics) == 4 and len(POLAR_EXPRESS.quintics) == 5
    plain = spec().model_dump(mode="json")  # what a spec of before has said, to the letter
    assert list(plain) == ["kind", "match", "lr", "weight_decay", "momentum", "nesterov", "steps"]
    every = {"method": "turbo", "equalize_rows": True, "second_moment": 0.95}
    assert every.items() <= spec(**every).model_dump(mode="json").items()


def test_no_method_is_left_without_an_iteration() -> None:
    """The fewest steps that a spec may have are those in which the runtime iterates once."""
    matrix = random(1, 6, 9)
    for name, method in METHODS.items():
        least = LEAST_STEPS.get(name, 1)
        prepared, _ = method.prepare(matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-7))
        assert least == method.replaces + 1
        assert not torch.allclose(orthogonalize(matrix, least, method), prepared)
        for steps in (1, least, 5):
            spec = MuonSpec.model_validate({"kind": "muon", "match": "*", "lr": 0.1, "method": name, "steps": steps})
            assert [problem.code for problem in spec.problems()] == (["S278"] if steps < least else [])


def reference_step(
    weight: Tensor, buffer: Tensor, moment: Tensor, grad: Tensor, lr: float, momentum: float, settings: dict[str, Any]
) -> Tensor:
    """One update of one matrix, from the formulas; `buffer` and `moment` change in place."""
    buffer.mul_(momentum).add_(grad)
    update = grad + momentum * buffer if settings.get("nesterov", True) else buffer.clone()
    if settings.get("equalize_rows"):
        update = torch.stack([row / max(float(row.norm()), 1e-7) for row in update])
    result = REFERENCES[settings["method"]](update, 5)
    if "second_moment" in settings:
        beta = settings["second_moment"]
        for i, row in enumerate(result):
            moment[i] = beta * moment[i] + (1 - beta) * float(row @ row) / row.numel()
        scaled = torch.stack([row / math.sqrt(float(moment[i])) for i, row in enumerate(result)])
        result = scaled * result.norm() / scaled.norm()
    rows, columns = weight.shape
    return weight * (1 - lr * 0.3) - lr * math.sqrt(max(1, rows / columns)) * result


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "polar_express", "nesterov": False},
        {"method": "turbo"},
        {"method": "polar_express", "equalize_rows": True},
        {"method": "polar_express", "second_moment": 0.9},
        {"method": "turbo", "equalize_rows": True, "second_moment": 0.5},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_updates_are_the_papers(settings: dict[str, Any]) -> None:
    params = [nn.Parameter(random(*shape, seed=i)) for i, shape in enumerate([*SHAPES, *SHAPES])]
    expected = [param.detach().double() for param in params]
    buffers = [torch.zeros_like(value) for value in expected]
    moments = [torch.zeros(value.shape[0], dtype=torch.float64) for value in expected]
    optimizer = muon(params, **settings)
    for step in range(4):
        momentum, lr = 0.8 + 0.05 * step, 0.1 / (step + 1)
        for i, param in enumerate(params):
            param.grad = random(*param.shape, seed=100 * step + i)
            grad = param.grad.double()
            expected[i] = reference_step(expected[i], buffers[i], moments[i], grad, lr, momentum, settings)
        optimizer.step(UPDATE, torch.tensor([lr, 0.3, momentum]).unbind())
    for param, want in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach().double(), want, rtol=0, atol=3e-4)


def test_normuon_evens_out_the_rows() -> None:
    """Rows of an orthogonalized tall matrix differ in length; with the second moment, they hardly do."""
    wide = nn.Parameter(torch.zeros(128, 16))
    plain = nn.Parameter(torch.zeros(128, 16))
    for param, more in ((wide, {"second_moment": 0.0}), (plain, {})):
        param.grad = random(128, 16)
        muon([param], method="polar_express", **more).step(UPDATE, torch.tensor([1.0, 0.0, 0.95]).unbind())
    lengths = [param.detach().norm(dim=1) for param in (wide, plain)]
    assert float(lengths[0].std() / lengths[0].mean()) < 1e-3 < 0.05 < float(lengths[1].std() / lengths[1].mean())
    assert float(wide.detach().norm()) == pytest.approx(float(plain.detach().norm()), rel=1e-4)


class Numbers(TorchDispatchMode):
    """Notes every operator with the Python numbers in its arguments: on a GPU, those of its launches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [*args, *(kwargs or {}).values()]
        self.seen.append((str(function), [value for value in flat if isinstance(value, bool | int | float)]))
        return function(*args, **(kwargs or {}))


def specs(*entries: dict[str, Any]) -> Any:
    return TrainSpec.model_validate({"tokens_per_step": 8, "steps": 9, "optimizers": entries}).optimizers


RAMP = {"at": ((0, 0.5), (4, 0.9)), "by": "step"}
TAPER = {"at": ((0, 0.3), (0.2, 0.3), (1, 0.1))}
MUON = {"kind": "muon", "match": "*.{up,down}", "lr": 0.1, "momentum": RAMP, "weight_decay": TAPER}
ADAMW = {"kind": "adamw", "match": "*", "lr": 0.1, "weight_decay": TAPER}


@pytest.mark.parametrize("method", list(METHODS))
def test_no_number_that_changes_by_step_is_in_a_launch(method: str) -> None:
    """So that a CUDA graph can hold the update: rate, momentum and decay are read from tensors."""
    params = {name: nn.Parameter(random(8, 6, seed=i)) for i, name in enumerate(("a.up", "b.up", "a.down"))}
    optimizers = Optimizers(params, specs({**MUON, "method": method, "second_moment": 0.9}))
    launches = []
    for step in range(3):
        for i, param in enumerate(params.values()):
            param.grad = random(8, 6, seed=50 * step + i)
        optimizers.set(Moment(1 / (step + 1), done=step / 4, step=step))
        with Numbers() as numbers:
            optimizers.update(optimizers.work(0))
        launches.append(numbers.seen)
    assert launches[0] == launches[1] == launches[2] and len(launches[0]) > 10


def test_weight_decay_tapers_by_the_share_of_the_run() -> None:
    """Gradients of 0 leave the decay alone: Muon's directions are 0, and so are Adam's."""
    params = {"a.up": nn.Parameter(torch.ones(3, 4)), "gain": nn.Parameter(torch.ones(5))}
    optimizers = Optimizers(params, specs(MUON, ADAMW))
    expected = 1.0
    for step, decay in ((0.0, 0.3), (0.2, 0.3), (0.6, 0.2), (1.0, 0.1)):
        for param in params.values():
            param.grad = torch.zeros_like(param)
        optimizers.set(Moment(0.5, done=step))
        optimizers.update(optimizers.work(0))
        expected *= 1 - 0.1 * 0.5 * decay
        for param in params.values():
            torch.testing.assert_close(param.detach(), torch.full_like(param, expected), rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("method", list(METHODS))
def test_a_graph_of_the_update_takes_new_numbers(method: str) -> None:
    """Captured once and replayed with other rates, momenta and decays, beside the same updates launched one by one."""
    shapes = {"a.up": (96, 32), "b.up": (96, 32), "a.down": (32, 96), "gain": (32,)}

    def fresh() -> tuple[dict[str, nn.Parameter], Optimizers]:
        params = {name: nn.Parameter(random(*shape, seed=i).cuda()) for i, (name, shape) in enumerate(shapes.items())}
        for param in params.values():
            param.grad = torch.zeros_like(param)
        return params, Optimizers(params, specs({**MUON, "method": method, "second_moment": 0.9}, ADAMW))

    (captured, graphed), (plain, launched) = fresh(), fresh()
    before = {name: tensor.clone() for name, tensor in graphed.state().items()}
    weights = {name: param.detach().clone() for name, param in captured.items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graphed.set(Moment())
        graphed.update(graphed.work(0))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.update(graphed.work(0))
    graphed.restore(before)
    with torch.no_grad():
        for name, param in captured.items():
            param.copy_(weights[name])
    for step in range(5):
        for i, name in enumerate(shapes):
            grad = random(*shapes[name], seed=100 * step + i).cuda()
            for params in (captured, plain):
                params[name].grad.copy_(grad)  # type: ignore[union-attr]
        graphed.set(Moment(1 / (step + 1), done=step / 5, step=step))
        graph.replay()
        launched.set(Moment(1 / (step + 1), done=step / 5, step=step))
        launched.update(launched.work(0))
    for name in shapes:
        torch.testing.assert_close(captured[name], plain[name], rtol=0, atol=1e-6)
        moved = (captured[name].detach() - weights[name]).abs().max()
        assert float(moved) > 0.05
