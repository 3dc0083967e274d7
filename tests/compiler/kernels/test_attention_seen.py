"""Attention to what is seen as a choice of kernels: references, the CPU's kernel, models of pairs and what may not
leak."""

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_sites import SHAPES, attention_site, several
from kernel_sites import imported
from pair_models import CROSS, EMBED, MLP, SELF, batch, blocks, pairs_spec
from tiny_models import Pair, float64, pair
from torch import Tensor

from specc.compiler import kernels, pipeline
from specc.compiler.catalog import catalog
from specc.compiler.kernels.attention.torch import SEEN_GRAD_TORCH, SEEN_TORCH
from specc.compiler.kernels.kernel import Kernel, symbol
from specc.compiler.ops.saved_attention import SeenAttention, SeenAttentionGrad
from specc.compiler.programs.programs import LoweringError
from specc.runtime.bench.plain import plain_site
from specc.runtime.model.load import group_function
from specc.runtime.tune.candidates import candidates
from specc.runtime.verify.judge import Judge, inputs_of, sizes_of
from specc.runtime.verify.verify import verify

GROUPED = {**SELF, "heads": 4, "kv_heads": 2}
ACROSS = {**CROSS, "heads": 4, "kv_heads": 1}
POINTS = (
    {"encoder.blocks.*.attention": ["y"]},
    {"decoder.blocks.*.attention": ["y"]},
    {"decoder.blocks.*.cross": ["y"]},
)


def spec(*fuse: dict[str, list[str]], targets: tuple[str, ...] = ("cpu",)) -> Any:
    model_spec = pairs_spec([EMBED, blocks(GROUPED, MLP)], [EMBED, blocks(GROUPED, ACROSS, MLP)], fuse=fuse or POINTS)
    return model_spec.model_copy(update={"targets": targets})


def random_sees(shape: tuple[int, int, int], t: int = 5, s: int = 7) -> tuple[Tensor, ...]:
    """dy, q, k, v and what is seen: of the first sequence all, of the second some, of the third nothing."""
    heads, groups, channels = shape
    generator = torch.Generator().manual_seed(3)
    sizes = ((t, heads), (t, heads), (s, groups), (s, groups))
    values = [torch.randn(3, n, h, channels, generator=generator, dtype=torch.float64) for n, h in sizes]
    seen = torch.ones(3, s, dtype=torch.bool)
    seen[1, 2::2], seen[2] = False, False
    return (*values, seen)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_references_are_the_formulas(shape: tuple[int, int, int]) -> None:
    dy, q, k, v, seen = random_sees(shape)
    y, lse = several(SeenAttention().reference(q, k, v, seen))
    dq, dk, dv = several(SeenAttentionGrad().reference(dy, q, k, v, y, lse, seen))
    wanted = [torch.zeros_like(value) for value in (y, lse, dq, dk, dv)]
    heads, groups, channels = shape
    for b, h, t in itertools.product(range(2), range(heads), range(q.shape[1])):
        g, keys = h * groups // heads, seen[b]
        s = k[b, keys, g] @ q[b, t, h] / channels**0.5
        p = s.exp() / s.exp().sum()
        wanted[0][b, t, h], wanted[1][b, h, t] = p @ v[b, keys, g], s.exp().sum().log()
        ds = p * (v[b, keys, g] @ dy[b, t, h] - dy[b, t, h] @ wanted[0][b, t, h]) / channels**0.5
        wanted[2][b, t, h] = ds @ k[b, keys, g]
        wanted[3][b, keys, g] += torch.outer(ds, q[b, t, h])
        wanted[4][b, keys, g] += torch.outer(p, dy[b, t, h])
    for result, want in zip((y, lse, dq, dk, dv), wanted, strict=True):
        torch.testing.assert_close(result, want, rtol=1e-11, atol=1e-12)  # all 0 where nothing is seen


def test_a_reference_of_many_sequences_is_that_of_each() -> None:
    dy, q, k, v, seen = random_sees((4, 2, 8), 512, 1024)  # of which 8 have their scores in memory at a time
    dy, q, k, v, seen = (value.repeat(4, *[1] * (value.dim() - 1)) for value in (dy, q, k, v, seen))
    y, lse = several(SeenAttention().reference(q, k, v, seen))
    grads = several(SeenAttentionGrad().reference(dy, q, k, v, y, lse, seen))
    assert all(len(value) == 12 and torch.equal(value[:3], value[9:]) for value in (y, lse, *grads))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", ["seen", "cross"])
def test_the_kernel_of_the_cpu_is_as_exact_as_plain_torch(
    kind: str, shape: tuple[int, int, int], tmp_path: Path
) -> None:
    given = random_sees(shape, 5, 5 if kind == "seen" else 7)
    outputs: list[Tensor] = []
    for backward, kernel in ((False, SEEN_TORCH), (True, SEEN_GRAD_TORCH)):
        site = attention_site(shape, backward, "cpu", "f32", kind)
        name = f"seen_cpu_{kind}_{'_'.join(map(str, shape))}_{backward}"
        function = getattr(imported(kernel, site, tmp_path / name), symbol(site)[0])
        for rows in (1, 7, 129):
            judge = Judge.of(site, inputs_of(site, sizes_of(site, rows), "cpu", seed=rows))
            assert all(error.ok for error in judge.errors(judge.call(function)))
        inputs = (*given[1:], given[-1])[:4] if not backward else (*given[:4], *outputs, given[-1])
        wanted = several(site.node.op.reference(*inputs))
        outputs = list(function(*inputs))
        for result, want in zip(outputs, wanted, strict=True):
            torch.testing.assert_close(result, want, rtol=1e-10, atol=1e-11)


def test_the_baseline_on_a_gpu_is_no_kernel_of_the_cpu() -> None:
    site = attention_site(SHAPES["golf"], kind="cross")
    assert plain_site(site) == site.node.op.reference
    cpu = attention_site(SHAPES["golf"], kind="cross", target="cpu", dtype="f32")
    assert plain_site(cpu) != cpu.node.op.reference


def test_a_judge_asks_for_no_more_tokens_than_the_model_has() -> None:
    site = attention_site(context=30)
    assert sizes_of(site, 343) == {"B": 2, "T": 30, "S": 30} and sizes_of(attention_site(context=4), 9)["T"] == 16
    assert sizes_of(attention_site(), 343)["T"] == 343


# --- models ---


def test_three_attentions_get_kernels_of_their_own() -> None:
    plan = pipeline.plan(spec(targets=("sm90",)), "sm90", "specs/x.yaml")
    results = {choice.rendered.module: choice.kernel.name for choice in plan.choices if choice.rendered.module}
    assert results == {
        "seen_attention__h4_g2_c2": "short_seen_attention",
        "seen_attention_grad__h4_g2_c2": "short_seen_attention_grad",
        "causal_attention__h4_g2_c2": "short_attention",
        "causal_attention_grad__h4_g2_c2": "short_attention_grad",
        "cross_attention__h4_g1_c2": "short_seen_attention",
        "cross_attention_grad__h4_g1_c2": "short_seen_attention_grad",
    }
    every = [candidate for choice in plan.generated for candidate in candidates(choice.site, "specs/x.yaml")]
    assert {candidate.kernel.name for candidate in every} == set(results.values()) and len(every) > 4 * len(results)


def test_a_model_of_long_sequences_says_what_no_kernel_takes() -> None:
    long = spec(targets=("sm90",))
    long = long.model_copy(update={"model": long.model.model_copy(update={"context": 200})})
    with pytest.raises(LoweringError, match=r"no kernel for sm90 computes decoder.blocks.\*.cross.y") as caught:
        pipeline.plan(long, "sm90", "specs/x.yaml")
    reason = "short_seen_attention: accepts at most 128 tokens; there may be 200"
    assert any(reason in (problem.hint or "") for problem in caught.value.problems)


def test_every_kernel_of_it_is_in_the_catalogue_by_direction() -> None:
    known = {k.name: k.computes for k in catalog(kernels, Kernel).values()}
    assert {name for name, op in known.items() if op is SeenAttention} == {
        "seen_attention_torch",
        "short_seen_attention",
    }
    assert all(op is SeenAttentionGrad for name, op in known.items() if name.startswith("seen_attention_grad"))


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    with float64():
        return pair(spec(), tmp_path_factory.mktemp("seen"))


def test_the_model_has_the_loss_and_gradients_of_its_reference(fused: Pair) -> None:
    assert len(fused.programs.groups) == 3
    source, target = batch(fused.spec)
    inputs = torch.cat([torch.ones(3, 1, dtype=torch.long), target[:, :-1]], 1)
    with float64():
        loss = fused.model(source, inputs, target)
        loss.backward()
        wanted = fused.reference("train", source=source, inputs=inputs, target=target)["loss"]
        gradients = torch.autograd.grad(wanted, list(fused.params.values()))
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    results = dict(fused.model.named_parameters())
    for name, want in zip(fused.params, gradients, strict=True):
        torch.testing.assert_close(results[name].grad, want, rtol=1e-8, atol=1e-10)


def test_pads_of_a_source_and_later_tokens_do_not_leak(fused: Pair) -> None:
    source, target = batch(fused.spec)
    with float64(), torch.no_grad():
        before = fused.model.score(source, target)
        longer = fused.model.score(torch.nn.functional.pad(source, (0, 4)), target)
        torch.testing.assert_close(longer, before, rtol=1e-12, atol=1e-12)  # more pads change nothing
        for j in range(target.shape[1] - 1):
            changed = target.clone()
            changed[0, j] = 3 + (changed[0, j] - 2) % 20
            moved = fused.model.score(source, changed)[0] != before[0]
            assert not moved[:j].any() and moved[j:].all()
        changed = source.clone()
        changed[0, 4] = 3 + (changed[0, 4] - 2) % 20
        moved = fused.model.score(changed, target) != before
        assert moved[0].all() and not moved[1:].any()  # all of its own line, and no other


def test_no_gradient_reaches_what_is_not_seen(fused: Pair) -> None:
    module = importlib.import_module(type(fused.model).__module__)
    cross = next(group for group in fused.programs.groups if group.name == "fused_cross")
    function = group_function(module, fused.programs, cross)
    _, q, k, v, seen = random_sees((4, 1, 2))
    free = [value.clone().requires_grad_() for value in (q, k, v)]
    function(*free, seen).square().sum().backward()
    dq, dk, dv = (value.grad for value in free)
    assert not dk[~seen].any() and not dv[~seen].any() and dk[seen].all() and dv[seen].all()
    assert dq[:2].all() and not dq[2].any()


def test_verify_holds_it_to_its_witnesses() -> None:
    checks = {check.name: check for check in verify(spec(), ("cpu",))}
    assert all(check.ok for check in checks.values()), checks
    assert {"kernel cross_attention__h4_g1_c2", "kernel seen_attention_grad__h4_g2_c2"} <= checks.keys()
