"""Merged linear layers and folded factors on a GPU: kernels read parts of one product, and compiled steps agree."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from run_samples import small_spec, write_text
from tiny_models import spec_data, spec_of
from torch._inductor.utils import run_and_get_code
from toy import feed_of

from specc.compiler.passes.assign_quant import allocation
from specc.compiler.spec.spec import Spec
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.windows.loader import Loader
from specc.runtime.data.windows.stream import open_stream
from specc.runtime.distributed.world import World
from specc.runtime.model.load import choose_target, initialize, instantiate
from specc.runtime.train.trainer import TrainableModel, Trainer
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


def test_compiled_code_copies_no_gradient_of_a_kernel(tmp_path: Path) -> None:
    """The gradient of the product of q, k and v is one tensor, which kernels and Torch's own code write."""
    case = spec(True, exclude={})
    loaded = instantiate(case, choose_target(case, None), tmp_path)
    initialize(loaded, 1)
    model = loaded.model.to("cuda", torch.bfloat16)
    ids = torch.randint(512, (4, 256), generator=torch.Generator().manual_seed(0)).cuda()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    _, codes = run_and_get_code(lambda: compiled(ids, ids.roll(-1, 1)).backward())
    lines = codes[-1].splitlines()
    joined = [line for line in lines if "empty_strided_cuda((4, 256, 512), (131072, 512, 1)" in line]
    writes = [line for line in lines if "grad_into" in line and ".default(" in line]
    blocks = len(model.blocks)
    assert 1 <= len(joined) <= blocks and len(writes) == 2 * blocks  # a block may use the buffer of another again


@pytest.mark.parametrize("qat", [False, True])
def test_a_captured_run_with_derived_weights_equals_one_of_separate_layers(qat: bool, tmp_path: Path) -> None:
    """CUDA graphs of micro-batches, gradients and updates, and of those after quantized weights began."""
    losses = []
    for rewritten in (True, False):
        torch.compiler.reset()
        more = ("train.schedule={warmdown_steps: 10}", *(["train.qat={below: 0.5}"] if qat else []))
        merge = ("merge=['*']", "fold=['*']") if rewritten else ()
        case = small_spec("train.steps=12", "train.tokens_per_step=512", "train.micro_batch=4", *merge, *more)
        folder = tmp_path / str(rewritten)
        loaded = instantiate(case, choose_target(case, None), folder / "generated")
        initialize(loaded, case.train.seed)
        stream: Any = open_stream(write_text(folder / "data"), "train", ByteTokenizer(), folder / "cache")
        loader = Loader(stream, case.train.at_once(), case.model.window, "coprime_stride", case.train.seed)
        programs = loaded.programs
        model = TrainableModel(
            loaded.model,
            programs.params,
            case.model.window,
            "digest",
            programs.phases,
            allocation(case.quant, programs.stored) if qat else None,
            derived=programs.derived_weights,
        )
        feed = feed_of(case.train, loader, case.model.window)
        trainer = Trainer(model, case.train, feed, World.alone().on(torch.device("cuda")), True)
        assert bool(trainer.masters.derived.leaves) == rewritten and trainer.micro_batches > 1
        steps = [step for _ in range(12) for step in trainer.advance()] + trainer.settle()
        assert trainer.fake_quantizes == qat
        losses.append([step.loss for step in steps])
        loader.close()
    assert losses[0] == pytest.approx(losses[1], rel=0.02) and losses[0][-1] < losses[0][0]
