"""`train.deterministic`: kernels that repeat their bits, runs with the same bits, and what is refused."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_samples import EXPERTS, SPEC, small_spec, write_text
from safetensors import safe_open

from specc.compiler import pipeline
from specc.compiler.build import canonical
from specc.compiler.kernels.attention.attention import FLASH_4_BACKWARD
from specc.compiler.kernels.kernel import NOT_REPEATABLE, symbol
from specc.compiler.plan.lock import Entry, Lock, Machine, TargetLock
from specc.compiler.programs.programs import LoweringError
from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec
from specc.runtime.errors import EnvironmentFailure, RunFailure
from specc.runtime.train.determinism import REDUCTION, WORKSPACE, deterministic_algorithms
from specc.runtime.train.train import TrainOptions, train
from specc.runtime.tune.candidates import candidates

ON = "train.deterministic=true"
CPU, GPU = torch.device("cpu"), torch.device("cuda")
LATENT = (
    "model.blocks.layers.0={kind: latent, heads: 4, kv_rank: 32, rope_dim: 16}",
    'quant.rules.1.match="*.{residual,q_gain,kv_norm_weight}"',
    'fuse=[{"blocks.*.latent": [y]}]',
)


def kernels(spec: Spec, target: str = "sm90", lock: Lock | None = None) -> dict[str, str]:
    choices = pipeline.plan(spec, target, "", *([lock] if lock is not None else [])).choices
    assert all(choice.kernel.deterministic for choice in choices) or not spec.train.deterministic
    return {choice.site.label: choice.kernel.name for choice in choices}


@pytest.mark.parametrize("target", ["sm80", "sm90", "sm120"])
def test_only_the_kernels_change_that_may_return_other_bits(target: str) -> None:
    targets = f"targets=[{target}, cpu]"
    path = SPEC.with_name("gpt_mlp35.yaml")
    usual, ordered = (kernels(load(path, (targets, *more))[0], target) for more in ((), (ON,)))
    changed = {label: (usual[label], ordered[label]) for label in usual if usual[label] != ordered[label]}
    before = "cudnn_attention_grad" if target != "sm120" else "flash_attention_grad"
    assert changed == {"blocks.*.attention.y.grad": (before, "flash_attention_grad_ordered")} or (
        target == "sm80" and set(changed) == {"blocks.*.attention.y.grad"}
    )


def test_a_measured_kernel_that_may_return_other_bits_is_not_used() -> None:
    """`tune` has no such candidate."""
    spec = load(SPEC.with_name("gpt2_124m.yaml"))[0]
    choices = pipeline.plan(spec, "sm90", "").choices
    (site,) = (choice.site for choice in choices if choice.site.label == "blocks.*.attention.y.grad")
    entry = Entry(key=site.key, node=site.label, kernel=FLASH_4_BACKWARD.name, rows=65536, ms=1.0, floor_ms=0.5)
    machine = Machine(gpu="H100", driver="1", torch="2", triton="3", cuda="13")
    lock = Lock(targets={"sm90": TargetLock(machine=machine, kernels={symbol(site)[1]: entry})})
    assert kernels(spec, lock=lock)[site.label] == FLASH_4_BACKWARD.name
    ordered = spec.model_copy(update={"train": spec.train.model_copy(update={"deterministic": True})})
    assert kernels(ordered, lock=lock)[site.label] == "flash_attention_grad_ordered"
    names = {candidate.kernel.name for candidate in candidates(replace(site, deterministic=True), "")}
    assert names == {"flash_attention_grad_ordered", "flash_attention_4_grad_ordered"}


def test_a_node_without_such_a_kernel_is_refused_with_the_reasons() -> None:
    spec = load(SPEC, ("targets=[sm90, cpu]", *LATENT))[0]
    assert "cudnn_attention_grad" in kernels(spec).values()
    with pytest.raises(LoweringError) as caught:
        pipeline.plan(load(SPEC, ("targets=[sm90, cpu]", *LATENT, ON))[0], "sm90", "")
    (problem,) = caught.value.problems
    assert problem.code == "S401" and "no kernel for sm90 computes blocks.*.latent.y.grad" in problem.message
    assert f"cudnn_attention_grad: {NOT_REPEATABLE}" in problem.hint


def test_old_specs_have_the_same_text_and_kernels() -> None:
    assert "deterministic" not in canonical(small_spec())
    assert small_spec("train.deterministic=false") == small_spec()


def run(spec: Spec, folder: Path, target: str = "cpu") -> dict[str, bytes]:
    """Trains, and returns the bytes of every tensor of the last checkpoint, by file and name."""
    data = write_text(folder / "data")
    result = train(TrainOptions(spec, target, str(data), folder / "run", cache=folder / "cache"), lambda line: None)
    tensors = {}
    for file in sorted(result.checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors |= {f"{file.name}/{name}": opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert len(tensors) > 20
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("more", [(), ("fuse=[]",), EXPERTS])
def test_two_runs_on_several_threads_have_the_same_bits(more: tuple[str, ...], tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        first, second = (run(small_spec(*more, ON), tmp_path / name) for name in "ab")
    finally:
        torch.set_num_threads(threads)
    assert first == second
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_settings_hold_only_inside() -> None:
    with deterministic_algorithms(True, CPU):
        assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic
    with deterministic_algorithms(False, GPU):
        assert not torch.are_deterministic_algorithms_enabled()


def test_a_gpu_has_a_fixed_order_of_sums_in_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    for name in (WORKSPACE, REDUCTION):
        monkeypatch.delenv(name, raising=False)
    with deterministic_algorithms(True, GPU):
        assert (os.environ[WORKSPACE], os.environ[REDUCTION]) == (":4096:8", "Ring")
        assert config.deterministic
    assert not config.deterministic
    monkeypatch.setenv(WORKSPACE, ":0:0")
    message = "needs CUBLAS_WORKSPACE_CONFIG=:4096:8, but the environment has :0:0"
    with pytest.raises(EnvironmentFailure, match=message), deterministic_algorithms(True, GPU):
        pass


def test_an_operation_without_a_deterministic_form_ends_the_run() -> None:
    message = "median_cuda has no deterministic form on cpu"
    with pytest.raises(RunFailure, match=message), deterministic_algorithms(True, CPU):
        raise RuntimeError("median_cuda does not have a deterministic implementation, but you set ...")
    with pytest.raises(RuntimeError, match="another"), deterministic_algorithms(True, CPU):
        raise RuntimeError("another error")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt_mini", "gpt_mlp35"])
def test_two_runs_on_a_gpu_have_the_same_bits(name: str, tmp_path: Path) -> None:
    """gpt_mlp35 has attention of 64 channels per head, whose usual gradient adds up in any order."""
    small = ("targets=[sm90, cpu]", "train.steps=20", "train.schedule={warmdown_steps: 1}", "train.validate_every=0")
    shape = () if name == "gpt_mini" else (
        "model.vocab=257", "model.blocks.count=11", "train.micro_batch=4", "train.tokens_per_step=16384",
        "train.budget_seconds=null", "train.data={tokenizer: bytes}",
    )  # fmt: skip
    spec = load(SPEC.with_name(f"{name}.yaml"), (*small, *shape, ON))[0]
    first, second = (run(spec, tmp_path / each, "sm90") for each in "ab")
    assert first.keys() == second.keys()
    assert not [tensor for tensor in first if first[tensor] != second[tensor]]
