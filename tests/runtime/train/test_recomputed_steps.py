"""Training with recomputed parts: the same bits as without."""

import gc
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from run_samples import EXPERTS, SPEC, VARIANTS, small_spec
from test_train_context import trainer_of

from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec
from specc.runtime.bench.step import random_trainer
from specc.runtime.model.load import initialize, instantiate
from specc.runtime.train.trainer import Trainer

DROPOUT = ("model.blocks.layers.1.dropout=0.25", "model.blocks.layers.0.dropout=0.125")
CASES = {name: VARIANTS[name] for name in ("partial rope", "skips, scaled norms", "no fusion")}
CASES |= {"dropout": DROPOUT, "dropout, no fusion": (*DROPOUT, "fuse=[]"), "experts": EXPERTS}


def trained(spec: Spec, folder: Path, steps: int = 3) -> Trainer:
    trainer = trainer_of(spec, folder)
    for _ in range(steps):
        trainer.advance()
    trainer.loader.close()
    return trainer


def at_once(function: Callable[..., Any], *args: Any, use_reentrant: bool, **more: Any) -> Any:
    """A call without recomputation."""
    return function(*args, **more)


@pytest.mark.parametrize("part", ["[mlp]", "[attention]", "[block]"])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_have_the_same_bits(
    case: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Independent products of an attention may have another order in a function of their own, so that their gradients
    are summed in another order. The same code without recomputation has the same bits in any case."""
    spec = small_spec(*CASES[case], f"train.recompute={part}")
    again = trained(spec, tmp_path / "again")
    plain = [trained(small_spec(*CASES[case]), tmp_path / "plain")] if part != "[attention]" else []
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", at_once)
    weights = again.masters.weights()
    for other in (*plain, trained(spec, tmp_path / "same")):
        assert torch.equal(other.masters.loss, again.masters.loss)
        assert all(torch.equal(weight, weights[name]) for name, weight in other.masters.weights().items())


@pytest.mark.parametrize("part", ["[mlp]", "[block]"])
def test_models_of_lines_draw_the_same_dropout(part: str, tmp_path: Path) -> None:
    """Torch's generator is set back before a part is computed again."""
    drops = [f"model.{layer}.dropout=0.2" for layer in ("encoder.1.layers.1", "decoder.1.layers.2")]
    results = []
    for more in ((), (f"train.recompute={part}",)):
        spec = load(SPEC.with_name("poly_transformer.yaml"), ("targets=[cpu]", "train.batch=16", *drops, *more))[0]
        with ExitStack() as stack:
            trainer = random_trainer(instantiate(spec, "cpu", tmp_path / str(len(results))), torch.device("cpu"), stack)
            results.append([step.loss for _ in range(3) for step in trainer.advance()])
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("part", "more"),
    [
        ("[mlp]", ()),
        ("[attention, mlp]", ()),
        ("[block]", ()),
        ("[block]", DROPOUT),  # of both layers
        ("[attention, mlp]", ("fuse=[]",)),  # two functions of single nodes
    ],
)
def test_one_graph_is_compiled_and_has_the_same_gradients(part: str, more: tuple[str, ...], tmp_path: Path) -> None:
    ids = torch.randint(0, 257, (4, 32), generator=torch.Generator().manual_seed(0))
    gradients = []
    for recomputed, compiled in ((False, False), (True, True)):
        spec = small_spec(*more, *([f"train.recompute={part}"] if recomputed else []))
        loaded = instantiate(spec, "cpu", tmp_path / str(recomputed))
        initialize(loaded, 1)
        torch.compiler.reset()
        model = torch.compile(loaded.model, fullgraph=True, backend="aot_eager") if compiled else loaded.model
        model(ids, ids.roll(-1, 1)).backward()
        gradients.append([param.grad for param in loaded.model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["[mlp]", "[attention]", "[block]"])
def test_on_a_gpu_losses_are_equal_and_memory_is_smaller(part: str, tmp_path: Path) -> None:
    """In CUDA graphs, with fused groups and dropout."""
    shape = ("targets=[sm90, cpu]", "train.micro_batch=64", "train.tokens_per_step=16384", "model.dim=256", *DROPOUT)
    results, peaks = [], []
    for more in ((), (f"train.recompute={part}",)):
        spec = load(SPEC, (*shape, *more))[0]
        torch.compiler.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer = trainer_of(spec, tmp_path / str(len(results)), "sm90", True)
        steps = [step for _ in range(6) for step in trainer.advance()] + trainer.settle()
        results.append([step.loss for step in steps])
        peaks.append(torch.cuda.max_memory_allocated() - before)
        trainer.loader.close()
        del trainer
        gc.collect()  # CUDA graphs hold its memory
    assert results[1] == pytest.approx(results[0], rel=2e-3)  # kernels of Torch's compiler may round differently
    assert peaks[1] < 0.95 * peaks[0]
