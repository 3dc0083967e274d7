"""Head and loss in chunks of rows: loss, gradients and scores are those of the whole, and logits are never whole."""

import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from run_samples import small_spec
from torch.profiler import ProfilerActivity, profile

from specc.compiler import pipeline
from specc.compiler.build import model_files
from specc.compiler.programs.fx_witness import check_types, round_trip, trace
from specc.compiler.programs.programs import LoweringError
from specc.compiler.report.step import step_of
from specc.runtime.model.load import instantiate

HEADS = "model.blocks.layers.0.head_dim=32"  # of a size that kernels of a GPU have
MEMBERS = "logits, softcap, loss"
TERMS = (
    "train.losses=[{kind: next_token, weight: 0.5}, {kind: z, weight: 0.01}, "
    "{kind: later_token, ahead: 2, weight: 0.25}]"
)
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "plain": ((), MEMBERS),
    "terms": ((TERMS,), MEMBERS),
    "untied": (("model.head.tied=false",), MEMBERS),
    "expression": (("model.head.softcap=23 * sigmoid((z + 5) / 7.5)", TERMS), MEMBERS),
    "no_cap": (("model.head.softcap=null",), "logits, loss"),
    "aligned": (("model.vocab=264",), MEMBERS),
}


def chunked(case: str, chunks: int | None, *others: str) -> Any:
    overrides, members = CASES[case]
    point = f"{{head: [{members}]{f', chunks: {chunks}' if chunks else ''}}}"
    return small_spec(*overrides, *others, f"fuse=[{point}]")


def filled(loaded: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return loaded.model.double()


def results(case: str, chunks: int | None, folder: Path, rows: int) -> dict[str, torch.Tensor]:
    loaded = instantiate(chunked(case, chunks), "cpu", folder)
    model = filled(loaded)
    ids, targets = torch.randint(257, (2, rows, 32), generator=torch.Generator().manual_seed(1))
    count = len(loaded.programs.program("train").inputs) - 2
    weights = [torch.tensor(value, dtype=torch.float64) for value in (0.5, 0.01, 0.25)[:count]]
    loss = model(ids, targets, *weights)
    (2 * loss).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    with torch.no_grad():
        return {"loss": loss.detach(), "score": model.score(ids, targets), **gradients}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("chunks", "rows"), [(2, 3), (7, 3), (200, 1)])
def test_results_are_those_of_the_whole(chunks: int, rows: int, case: str, tmp_path: Path) -> None:
    """In float64, with a number of rows that chunks do not divide, and with fewer rows than chunks."""
    wanted = results(case, None, tmp_path / "whole", rows)
    measured = results(case, chunks, tmp_path / "chunks", rows)
    assert measured.keys() == wanted.keys()
    for name, value in wanted.items():
        assert value.abs().max() > 0
        torch.testing.assert_close(measured[name], value, rtol=1e-10, atol=1e-12, msg=name)


def head_of(target: str, chunks: int | None, folder: Path) -> Any:
    """The fused head of a model; without a GPU, its kernel is the plain one of the CPU."""
    overrides = (f"targets=[{target}]", "model.vocab=4100", HEADS)
    modules = []
    for name in (target, "cpu"):
        spec = chunked("plain", chunks, *overrides, f"targets=[{name}]")
        modules.append(sys.modules[type(instantiate(spec, name, folder / name).model).__module__])
    head: Any = modules[0].FusedHead
    vars(modules[0])["softmax_loss_tanh"] = vars(modules[1])["softmax_loss_tanh"]
    return head.apply


def peak_bytes(run: Callable[[], object]) -> int:
    """The most memory that a run on the CPU allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize(("target", "dtype"), [("cpu", torch.float64), ("sm80", torch.bfloat16)])
def test_compiled_code_keeps_one_part_of_a_gradient(target: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Inductor adds a chunk's gradient of the weight to the sum before it computes that of the next chunk."""
    generator = torch.Generator().manual_seed(1)
    x, token = (torch.randn(rows, 64, generator=generator).to(dtype) for rows in (128, 4100))
    targets = torch.randint(4100, (128,), generator=generator)
    whole, parts = (head_of(target, chunks, tmp_path / str(chunks)) for chunks in (None, 7))
    torch._dynamo.reset()
    compiled = torch.compile(parts, fullgraph=True)

    def step(apply: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        inputs = [value.to(dtype).requires_grad_() for value in (x, token)]
        loss = apply(*inputs, targets)
        return loss, *torch.autograd.grad(3 * loss, inputs)

    wanted = step(whole, torch.float64)
    for apply in (parts, compiled):
        for value, exact in zip(step(apply, dtype), wanted, strict=True):
            assert (value - exact).norm() <= (1e-2 if dtype == torch.bfloat16 else 1e-12) * exact.norm()
    size, wide = token.itemsize, max(token.itemsize, 4)
    converted = wide if wide > size else 0  # kernels of the CPU convert a part before they add it
    limit = 2 * size + wide + converted + size  # the padded weight, a part and the sum; the last for logits of a chunk
    assert peak_bytes(lambda: step(compiled, dtype)) < limit * token.numel()


def test_no_tensor_has_the_logits_of_all_rows(tmp_path: Path) -> None:
    """Neither in training nor in scoring; the whole has one."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for value in torch.utils._pytree.tree_leaves(result):
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    self.count = max(self.count, value.numel())
            return result

    def largest(chunks: int | None) -> int:
        model = instantiate(chunked("plain", chunks), "cpu", tmp_path / str(chunks)).model
        ids, targets = torch.randint(257, (2, 4, 32), generator=torch.Generator().manual_seed(1))
        with Largest() as seen:
            model(ids, targets).backward()
            with torch.no_grad():
                model.score(ids, targets)
        return seen.count

    logits = 4 * 32 * 320  # padded to whole cache lines
    assert largest(None) == logits
    assert largest(8) < logits / 2


def test_the_witness_finds_the_groups_in_train_and_score(tmp_path: Path) -> None:
    loaded = instantiate(chunked("terms", 3), "cpu", tmp_path)
    module: Any = __import__("sys").modules[type(loaded.model).__module__]
    for program, method in (("train", "forward"), ("score", "score")):
        traced = trace(loaded.model, module, method)
        assert round_trip(loaded.programs, program, traced) > 10
        assert check_types(loaded.programs, program, traced, loaded.model, 2, 8) > 10


def saved_bytes(spec: Any, target: str) -> int:
    return step_of(spec, pipeline.plan(spec, target, "specs/s.yaml")).memory.groups["head"]


@pytest.mark.parametrize(("target", "size"), [("cpu", 4), ("sm80", 2)])
def test_memory_of_the_plan_has_the_logits_of_one_chunk(target: str, size: int) -> None:
    specs = [chunked("plain", chunks, f"targets=[{target}]", HEADS) for chunks in (None, 4)]
    whole, parts = (saved_bytes(spec, target) for spec in specs)
    rows, padded = 4 * 32, 320 * 32
    if target == "cpu":
        assert whole == size * (rows * 320 + padded)  # the gradient of the logits, and the padded weight
    else:  # compiled code computes both products of the backward in the forward
        assert whole == size * (rows * 32 + 257 * 32)
    assert parts == size * (rows // 4 * 320 + padded + rows * 32) + 4 * 257 * 32  # the gradient of the weight is f32


def test_only_the_loss_has_chunks() -> None:
    spec = small_spec("fuse=[{blocks.*.mlp: [up, act, down], chunks: 2}]")
    with pytest.raises(LoweringError) as caught:
        pipeline.run(spec, "cpu")
    (problem,) = caught.value.problems
    words = "mlp.down cannot be computed in chunks; only a fusion point that ends in the loss can have `chunks`"
    assert (problem.code, problem.message) == ("S304", f"blocks.*.mlp: {words}")


def test_scores_in_chunks_have_no_backward(tmp_path: Path) -> None:
    text = model_files(pipeline.plan(chunked("plain", 2), "cpu", "specs/s.yaml"))["model.py"]
    assert "in 2 chunks of rows. Has no gradient." in text
    model = instantiate(chunked("plain", 2), "cpu", tmp_path).model
    ids, targets = torch.randint(257, (2, 3, 32))
    with pytest.raises(NotImplementedError, match="implement either the backward"):
        model.score(ids, targets).sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["plain", "expression"])
def test_on_a_gpu_compiled_and_eager(case: str, tmp_path: Path) -> None:
    """In bf16, with rows of logits that registers do not hold: nearly the whole's results, in less memory."""
    measured = []
    for chunks in (None, 7):
        spec = chunked(case, chunks, "targets=[sm80]", "model.vocab=20001", HEADS)
        loaded = instantiate(spec, "sm80", tmp_path / str(chunks))
        model = filled(loaded).cuda().bfloat16()
        ids, targets = torch.randint(20001, (2, 64, 32), generator=torch.Generator().manual_seed(1)).cuda()
        count = len(loaded.programs.program("train").inputs) - 2
        weights = [torch.tensor(value).cuda() for value in (0.5, 0.01, 0.25)[:count]]
        for run in (model, torch.compile(model)):
            run(ids, targets, *weights).backward()  # compiles, which allocates memory too
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            begun = torch.cuda.memory_allocated()
            loss = run(ids, targets, *weights)
            loss.backward()
            memory = torch.cuda.max_memory_allocated() - begun
            gradients = {name: parameter.grad.double() for name, parameter in model.named_parameters()}
            with torch.no_grad():
                measured.append((loss.double(), model.score(ids, targets), gradients, memory))
    (loss, scores, gradients, memory), *others = measured
    for other_loss, other_scores, other_gradients, _ in others:
        torch.testing.assert_close(other_loss, loss, rtol=1e-3, atol=0)
        torch.testing.assert_close(other_scores, scores, rtol=2e-2, atol=2e-2)
        for name, value in gradients.items():
            assert (other_gradients[name] - value).norm() <= 0.03 * value.norm(), name
    logits = 64 * 32 * 20032 * 2
    peaks = [memory, *(part for *_, part in others)]
    assert max(peaks[2:]) < memory - logits / 2, peaks
