"""Training on a GPU: bf16 copies, compiled, numbers a step late, Muon in bf16."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from log_lines import read_log
from run_samples import gpt_mini
from test_optim_late import SCHEMES
from toy import WINDOW, Toy, Watch, feed_of, stream, train_spec, trainable, trainer

from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.train import TrainSpec
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.windows.loader import Loader
from specc.runtime.distributed.world import World
from specc.runtime.errors import RunFailure
from specc.runtime.metrics.validation import Validation
from specc.runtime.model import cuda_graph as capture
from specc.runtime.optim.masters import Masters
from specc.runtime.optim.orthogonalize import orthogonalize
from specc.runtime.storage import checkpoint
from specc.runtime.train.trainer import Trainer


@pytest.fixture(autouse=True)
def forget_compiled_code() -> None:
    """Torch limits how often one process compiles a method, and each test compiles `Toy.forward` again."""
    torch._dynamo.reset()


pytestmark = pytest.mark.gpu


def gpu_trainer(
    folder: Path,
    train: TrainSpec | None = None,
    model: Toy | None = None,
    compiled: bool = True,
    grids: Mapping[str, Scheme] | None = None,
) -> Trainer:
    train = train or train_spec()
    torch.manual_seed(train.seed)
    loader = Loader(stream(folder), train.micro_batch, WINDOW, train.data.order, train.seed)
    model = model or Toy(noise=0.0)
    world = World.alone().on(torch.device("cuda"))
    return Trainer(trainable(model, "bf16", grids), train, feed_of(train, loader), world, compiled)


def test_numbers_come_a_step_late_and_are_those_of_the_cpu(tmp_path: Path) -> None:
    device, plain = gpu_trainer(tmp_path), trainer(tmp_path, model=Toy(noise=0.0))
    assert device.advance() == []
    results = [step for _ in range(19) for step in device.advance()] + device.settle()
    wanted = [step for _ in range(20) for step in plain.advance()]
    assert [step.step for step in results] == list(range(1, 21)) and device.settle() == []
    assert [step.loss for step in results] == pytest.approx([step.loss for step in wanted], rel=0.03)
    assert [step.lr for step in results] == pytest.approx([step.lr for step in wanted])
    assert all(master.is_cuda and master.dtype == torch.float32 for master in device.masters.tensors.values())


def test_resuming_goes_on(tmp_path: Path) -> None:
    whole = gpu_trainer(tmp_path)
    losses = [step.loss for _ in range(20) for step in whole.advance()] + [step.loss for step in whole.settle()]
    half = gpu_trainer(tmp_path)
    for _ in range(9):
        half.advance()
    half.settle()
    saved = checkpoint.load(checkpoint.save(tmp_path / "c", half.snapshot()))
    resumed = gpu_trainer(tmp_path)
    resumed.restore(saved)
    again = [step.loss for _ in range(11) for step in resumed.advance()] + [step.loss for step in resumed.settle()]
    assert again == pytest.approx(losses[9:], rel=1e-3)  # sums of gradients by atomics come in any order


def test_warming_up_leaves_no_trace(tmp_path: Path) -> None:
    gpu_run = gpu_trainer(tmp_path)
    before = {name: tensor.detach().clone() for name, tensor in gpu_run.masters.tensors.items()}
    state = {name: tensor.clone() for name, tensor in gpu_run.optimizers.state().items()}
    rng = torch.cuda.get_rng_state()
    gpu_run.warm_up(257)
    assert all(torch.equal(before[name], tensor.detach()) for name, tensor in gpu_run.masters.tensors.items())
    assert all(torch.equal(state[name], tensor) for name, tensor in gpu_run.optimizers.state().items())
    assert torch.equal(rng, torch.cuda.get_rng_state()) and gpu_run.step == 0


VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "swa, no clip": {"average": {"kind": "swa", "every": 2, "below": 0.65}, "clip_norm": None},
    "rounded late": {"qat": {"below": 0.7}},
    "muon's kin": {
        "optimizers": (
            {
                "kind": "muon",
                "match": "blocks.{up,down}",
                "lr": 0.02,
                "method": "polar_express",
                "equalize_rows": True,
                "second_moment": 0.9,
                "weight_decay": {"at": ((0, 0.1), (0.5, 0.1), (1, 0.01))},
            },
            {"kind": "adamw", "match": "*", "lr": 0.02, "weight_decay": {"at": ((0, 0.1), (0.5, 0.1), (1, 0.01))}},
        )
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_replaying_graphs_trains_as_calling_does(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches and updates; rounding begins in the middle, and wants graphs of its own."""
    train = train_spec(**VARIANTS[variant])
    replayed = gpu_trainer(tmp_path, train, grids=SCHEMES)
    losses = [step.loss for _ in range(20) for step in replayed.advance()] + [s.loss for s in replayed.settle()]
    monkeypatch.setattr(capture, "WARM_UP", 10**9)
    called = gpu_trainer(tmp_path, train, grids=SCHEMES)
    again = [step.loss for _ in range(20) for step in called.advance()] + [s.loss for s in called.settle()]
    assert again == pytest.approx(losses, rel=1e-3)
    for name, master in called.masters.tensors.items():
        torch.testing.assert_close(master, replayed.masters.tensors[name], rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(
            called.masters.model_parameters[name], replayed.masters.model_parameters[name], rtol=5e-2, atol=5e-2
        )


def test_what_is_not_finite_stops_a_step_later_and_is_named(tmp_path: Path) -> None:
    model = Toy(noise=0.0)
    gpu_run = gpu_trainer(tmp_path, model=model, compiled=False)
    for _ in range(3):
        gpu_run.advance()
    gpu_run.settle()
    model.blocks.down.register_hook(lambda grad: torch.full_like(grad, math.nan))
    assert gpu_run.advance() == []
    with pytest.raises(RunFailure, match=r"step 4: .*the first parameter with NaN or infinity is blocks\.down"):
        gpu_run.advance()


def test_a_run_on_the_clock(tmp_path: Path) -> None:
    from specc.runtime.log import Reporter, RunLog
    from specc.runtime.storage.run_directory import Run
    from specc.runtime.train.loop import Limits, Loop

    train = train_spec(steps=None, budget_seconds=1.0, schedule={"warmdown_steps": 20}, validate_every=10)
    gpu_run = gpu_trainer(tmp_path, train)
    run = Run(tmp_path / "run", gpt_mini(), "sm90", "text")
    run.checkpoints.mkdir(parents=True)
    log, validation = RunLog(run.log), Validation(stream(tmp_path, "val"), ByteTokenizer(), 8, 200)
    reporter, save = Reporter(log, Watch(None), lambda text: None), partial(checkpoint.save, run.checkpoints)
    result = Loop(run, gpu_run, validation, reporter, Limits(), save).run()
    log.close()
    steps = [record for record in read_log(run.log) if record["event"] == "step"]
    assert result.complete and [record["step"] for record in steps] == list(range(1, result.step + 1))
    assert steps[-1]["loss"] < steps[0]["loss"] and checkpoint.fault(result.checkpoint) is None


@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 96)])
def test_muon_orthogonalizes_in_bf16(shape: tuple[int, int]) -> None:
    batch = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    exact, result = orthogonalize(batch, 5), orthogonalize(batch.cuda(), 5).cpu()
    assert result.dtype == torch.float32
    assert float((result - exact).norm() / exact.norm()) < 0.05


def test_gradients_are_collected_in_few_kernels() -> None:
    """105 matrices in bf16, as many as gpt_mlp35_base has: one kernel each would be 105."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(96 + i, 40, device="cuda")) for i in range(105)])
    masters = Masters(model, {name: torch.bfloat16 for name, _ in model.named_parameters()})
    masters.clear()
    for _ in range(2):
        grads = [torch.randn_like(param) for param in model]
        for param, grad in zip(model, grads, strict=True):
            param.grad = grad
        before = [total.clone() for total in masters.gradients]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            masters.collect()
            torch.cuda.synchronize()
        kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        assert 1 <= len(kernels) <= 8
        for total, old, grad in zip(masters.gradients, before, grads, strict=True):
            assert torch.equal(total, old + grad)  # f32 sums of bf16, as tensor by tensor
