"""Matrices that a model computes from its parameters: once per step, with the gradients of each parameter."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_samples import small_spec, write_text
from torch import Tensor
from toy import feed_of

from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.windows.loader import Loader
from specc.runtime.data.windows.stream import open_stream
from specc.runtime.distributed.world import World
from specc.runtime.model.load import Loaded, initialize, instantiate
from specc.runtime.train.trainer import TrainableModel, Trainer

BOTH = ("merge=['*']", "fold=['*']")
SMALL = ("train.steps=4", "train.tokens_per_step=256", "train.micro_batch=2")


def loaded_of(folder: Path, *overrides: str) -> Loaded:
    spec = small_spec(*SMALL, *overrides)
    loaded = instantiate(spec, "cpu", folder / "generated")
    initialize(loaded, spec.train.seed)
    generator = torch.Generator().manual_seed(1)
    for parameter in loaded.model.parameters():  # some are 0 at first, and would hide errors
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return loaded


def trainer_of(folder: Path, *overrides: str, held: bool = True, dtype: str = "f32") -> Trainer:
    """A trainer on the CPU. Without `held`, the model computes its matrices in each call."""
    loaded = loaded_of(folder, *overrides)
    spec, programs = loaded.spec, loaded.programs
    stream: Any = open_stream(write_text(folder / "data"), "train", ByteTokenizer(), folder / "cache")
    loader = Loader(stream, spec.train.at_once(), spec.model.window, "coprime_stride", spec.train.seed)
    params = tuple(replace(param, dtype=dtype) for param in programs.params)
    derived = tuple(replace(weight, dtype=dtype) for weight in programs.derived_weights) if held else ()
    model = TrainableModel(loaded.model, params, spec.model.window, "digest", programs.phases, derived=derived)
    feed = feed_of(spec.train, loader, spec.model.window)
    trainer = Trainer(model, spec.train, feed, World.alone(), False)
    trainer.masters.restore({name: value.detach().clone() for name, value in trainer.masters.weights().items()})
    return trainer


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """The gradients of the next step, before the update."""
    from specc.runtime.optim.schedule import Moment

    trainer._gradients((trainer.loader.next() for _ in range(trainer.micro_batches)), Moment())
    return {name: grad.clone() for name, grad in zip(trainer.masters.tensors, trainer.masters.gradients, strict=True)}


def test_gradients_equal_those_of_matrices_in_each_pass(tmp_path: Path) -> None:
    """And those of a model without merged layers and folded factors."""
    once, each, plain = (
        gradients(trainer_of(tmp_path / name, *keys, held=held))
        for name, keys, held in (("once", BOTH, True), ("each", BOTH, False), ("plain", (), False))
    )
    assert once.keys() == plain.keys()
    for name, want in plain.items():
        scale = want.abs().max()
        assert scale > 0, name
        torch.testing.assert_close(once[name], each[name], rtol=1e-4, atol=1e-5 * float(scale), msg=name)
        torch.testing.assert_close(once[name], want, rtol=1e-4, atol=1e-5 * float(scale), msg=name)


@pytest.mark.parametrize("part", ["block", "attention", "mlp"])
def test_a_recomputed_part_reads_the_held_matrices(part: str, tmp_path: Path) -> None:
    plain, again = (
        gradients(trainer_of(tmp_path / name, *BOTH, *keys))
        for name, keys in (("plain", ()), ("again", (f"train.recompute=[{part}]",)))
    )
    for name, want in plain.items():
        torch.testing.assert_close(again[name], want, rtol=1e-4, atol=1e-5 * float(want.abs().max()), msg=name)


def test_a_run_equals_one_with_matrices_in_each_pass(tmp_path: Path) -> None:
    once, each = (trainer_of(tmp_path / str(held), *BOTH, held=held) for held in (True, False))
    for _ in range(3):
        (step,), (want,) = once.advance(), each.advance()
        assert step.loss == pytest.approx(want.loss, rel=1e-5)
    for name, master in once.masters.tensors.items():
        torch.testing.assert_close(master, each.masters.tensors[name], rtol=1e-3, atol=1e-4, msg=name)


def test_matrices_are_computed_once_per_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path, *BOTH)
    assert trainer.micro_batches > 1
    block = trainer._module.blocks[0]
    calls: list[str] = []
    for name in [name for name, value in vars(type(block)).items() if hasattr(value, "__wrapped__")]:
        method = getattr(type(block), name)

        def counted(self: Any, name: str = name, wrapped: Any = method.__wrapped__) -> Tensor:
            calls.append(name)
            value: Tensor = wrapped(self)
            return value

        monkeypatch.setattr(method, "__wrapped__", counted)
    trainer.advance()
    count = len(trainer._module.blocks)
    assert len(set(calls)) == 3  # q, k and v; out; down
    assert all(calls.count(name) == 2 * count for name in set(calls))  # values, and gradients of the parameters


def test_matrices_in_bf16_are_rounded_once(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, *BOTH, dtype="bf16")
    masters, block = trainer.masters, trainer._module.blocks[1]
    residual, down = (masters.tensors[f"blocks.1.mlp.{name}"].detach() for name in ("residual", "down"))
    held = block.mlp_down_scaled()
    assert held.dtype == torch.bfloat16 and held.requires_grad and held.is_leaf
    assert torch.equal(held, (residual[:, None] * down).bfloat16())
    assert not torch.equal(held, residual.bfloat16()[:, None] * down.bfloat16())
    q_k_v = [masters.tensors[f"blocks.1.attention.{name}"].detach().bfloat16() for name in "qkv"]
    assert torch.equal(block.attention_q_k_v_weight(), torch.cat(q_k_v))


def test_one_matrix_in_f32_exists_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    masters = trainer_of(tmp_path, *BOTH, dtype="bf16").masters
    kind = type(masters.derived._weights[0][1])
    of, earlier = kind.of, list[weakref.ref[Tensor]]()

    def watched(self: Any, values: Any) -> Tensor:
        assert all(other() is None for other in earlier)
        earlier.append(weakref.ref(value := of(self, values)))
        return value

    monkeypatch.setattr(kind, "of", watched)
    masters.refresh()
    assert len(earlier) == len(masters.derived.leaves) > 1


def test_other_weights_have_their_own_matrices(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, *BOTH, dtype="bf16")
    masters, block = trainer.masters, trainer._module.blocks[0]
    before = block.mlp_down_scaled().clone()
    doubled = {name: 2 * value for name, value in masters.weights().items()}
    with masters.swapped(doubled):
        assert torch.equal(block.mlp_down_scaled(), 4 * before)
    assert torch.equal(block.mlp_down_scaled(), before)
    masters.restore(doubled)
    assert torch.equal(block.mlp_down_scaled(), 4 * before)


def test_quantized_weights_have_their_own_matrices(tmp_path: Path) -> None:
    """With `train.qat`, a matrix is that of the quantized weights, and its gradient passes straight through them."""
    folder = tmp_path / "qat"
    loaded = loaded_of(folder, *BOTH)
    from specc.compiler.passes.assign_quant import allocation
    from specc.runtime.optim.masters import Masters

    schemes = allocation(loaded.spec.quant, loaded.programs.stored)
    copied = [name for name, scheme in schemes.items() if scheme.has_grid]
    dtypes = dict.fromkeys(dict(loaded.model.named_parameters()), torch.float32)
    masters = Masters(loaded.model, dtypes, copied=copied, derived=loaded.programs.derived_weights)
    masters.fake_quantize(schemes)
    block = loaded.model.blocks[0]
    down, residual = block.mlp.down.detach(), block.mlp.residual.detach()
    assert not torch.equal(down, masters.tensors["blocks.0.mlp.down"])
    assert torch.equal(block.mlp_down_scaled(), residual[:, None] * down)
    masters.clear()
    block.mlp_down_scaled().grad = torch.ones_like(down)
    masters.collect()
    masters.finish(1, None)
    by_name = dict(zip(masters.tensors, masters.gradients, strict=True))
    torch.testing.assert_close(by_name["blocks.0.mlp.residual"], down.sum(1))
    torch.testing.assert_close(by_name["blocks.0.mlp.down"], residual[:, None].expand_as(down))


def test_compiled_code_reads_the_held_matrices(tmp_path: Path) -> None:
    """The whole program is one graph, and the gradients of matrices are those of uncompiled code."""
    trainer = trainer_of(tmp_path, *BOTH)
    ids, targets = trainer.loader.next()
    results = []
    for function in (trainer._module, torch.compile(trainer._module, fullgraph=True, backend="aot_eager")):
        trainer.masters.clear()
        function(ids, targets).backward()
        results.append([leaf.grad.clone() for leaf in trainer.masters.derived.leaves])
        assert trainer._module.blocks[0].mlp.down.grad is None
    for one, other in zip(*results, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other)
