"""Attention with any score and mask: the references against sums written out token by token, and the CPU's kernels."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from attention_sites import several
from kernel_sites import check_clean, imported, written
from tiny_models import ATTENTION, MLP, tiny
from torch import Tensor

from specc.compiler import pipeline
from specc.compiler.ir.graph import Node
from specc.compiler.ir.types import TensorType
from specc.compiler.kernels.attention.torch import SCORED_GRAD_TORCH, SCORED_TORCH
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.saved_attention import ScoredAttention, ScoredAttentionGrad, starts_of
from specc.compiler.targets import TARGETS

B, T, H, G, C = 2, 11, 4, 2, 8
SAME = "document(i) == document(j)"
CASES = {
    "alibi": (ScoredAttention("s - slope(h) * (i - j)"), {}),
    "softcap": (ScoredAttention("5 * tanh(0.2 * s)", scale=0.3), {}),
    "window": (ScoredAttention(mask="j <= i and i - j < 4"), {}),
    "first keys": (ScoredAttention(mask="j <= i and (i - j < 3 or j < 2)", sinks=True), {"sinks": (H,)}),
    "dilated": (ScoredAttention(mask="j <= i and (i - j) % 3 == 0"), {}),
    "earlier": (ScoredAttention(mask="j < i"), {}),
    "by head": (ScoredAttention(mask="j <= i and (h == 1 or i - j < 4)"), {}),
    "documents": (ScoredAttention(mask=f"j <= i and {SAME}", sinks=True), {"sinks": (H,)}),
    "buckets": (ScoredAttention("s + bias[h, bucket(i - j, 8, 16)]", tables=("bias",)), {"bias": (H, 8)}),
    "tables": (
        # these are also names of values of the gradient
        ScoredAttention("s * p[min(i - j, 3)] + index[h, i, j] ** 2", f"j <= i and {SAME}", None, ("p", "index"), True),
        {"sinks": (H,), "p": (4,), "index": (H, T, T)},
    ),
}  # fmt: skip


def inputs_of(name: str) -> list[Tensor]:
    """q, k, v and the further inputs of a case, in float64."""
    op, shapes = CASES[name]
    generator = torch.Generator().manual_seed(len(name))

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    starts = [starts_of(torch.randint(4, (B, T), generator=generator))] if op.documents else []
    return [values(B, T, H, C), values(B, T, G, C), values(B, T, G, C), *starts, *(values(*s) for s in shapes.values())]


def by_pairs(op: ScoredAttention, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """y and lse, pair by pair, with the score and the mask evaluated by Python."""
    q, k, v, *rest = inputs
    further = dict(zip(op.further, rest, strict=True))
    start = further.get("start")
    y, lse = torch.zeros_like(q), q.new_zeros(B, H, T)
    scale = C**-0.5 if op.scale is None else op.scale
    mask = op.mask.replace(SAME, "start[b, i] == start[b, j]")

    def bucket(d: int, count: int, distance: int) -> int:
        exact = count // 2
        far = exact + int(math.log(max(d, 1) / exact) / math.log(distance / exact) * (count - exact))
        return d if d < exact else min(far, count - 1)

    names = {"slope": lambda h: 2.0 ** (-2 * (h + 1)), "tanh": torch.tanh, "bucket": bucket, "start": start, **further}
    for b, h, i in itertools.product(range(B), range(H), range(T)):
        seen = [j for j in range(T) if eval(mask, names, {"b": b, "h": h, "i": i, "j": j})]
        scores = [
            eval(op.score, names, {"h": h, "i": i, "j": j, "s": scale * (q[b, i, h] @ k[b, j, h * G // H])})
            for j in seen
        ]
        terms = [score.exp() for score in scores]
        total = sum(terms, further["sinks"][h].exp() if op.sinks else torch.tensor(0.0).double())
        if total > 0:
            lse[b, h, i] = total.log()
            y[b, i, h] = (
                sum(term / total * v[b, j, h * G // H] for term, j in zip(terms, seen, strict=True)) if seen else 0
            )
    return y, lse


def site_of(name: str, backward: bool) -> Site:
    op, shapes = CASES[name]
    q, k, lse = (TensorType(shape, "f32") for shape in (("B", "T", H, C), ("B", "T", G, C), ("B", H, "T")))
    further = [TensorType(("B", "T"), "i64")] if op.documents else []
    further += [TensorType(shape, "f32") for shape in shapes.values()]
    types = (q, q, k, k, q, lse, *further) if backward else (q, k, k, *further)
    fields = (op.score, op.mask, op.scale, op.tables, op.sinks)
    chosen = ScoredAttentionGrad(*fields) if backward else op
    path = "attention.y.grad" if backward else "attention.y"
    node = Node(path, chosen, tuple(f"v{i}" for i in range(len(types))), chosen.infer(types))
    return Site(node, types, TARGETS["cpu"], f"blocks.*.{path}", "sample", None)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_the_sum_over_pairs(name: str) -> None:
    op, _ = CASES[name]
    inputs = inputs_of(name)
    for result, want in zip(several(op.reference(*inputs)), by_pairs(op, inputs), strict=True):
        torch.testing.assert_close(result, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_kernels_of_the_cpu_equal_the_references(name: str, tmp_path: Path) -> None:
    op, _ = CASES[name]
    folder = tmp_path / f"scored_{name.replace(' ', '_')}"
    sites = [site_of(name, backward) for backward in (False, True)]
    modules = [
        imported(kernel, site, folder) for kernel, site in zip((SCORED_TORCH, SCORED_GRAD_TORCH), sites, strict=True)
    ]
    functions = [
        getattr(module, kernel.render(site).function)
        for module, kernel, site in zip(modules, (SCORED_TORCH, SCORED_GRAD_TORCH), sites, strict=True)
    ]
    check_clean(folder)
    inputs = inputs_of(name)
    dy = torch.randn(B, T, H, C, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y, lse = several(op.reference(*inputs))
    gradient = ScoredAttentionGrad(op.score, op.mask, op.scale, op.tables, op.sinks)
    wanted = several(gradient.reference(dy, *inputs[:3], y, lse, *inputs[3:]))
    results = [*functions[0](*inputs), *functions[1](dy, *inputs[:3], y, lse, *inputs[3:])]
    for have, want in zip(results, (y, lse, *wanted), strict=True):
        torch.testing.assert_close(have.double(), want.double(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_kernels_reject_gpus(name: str) -> None:
    site = site_of(name, False)
    assert SCORED_TORCH.rejects(site) is None
    on_gpu = Site(site.node, site.inputs, TARGETS["sm90"], site.label, site.module)
    assert SCORED_TORCH.rejects(on_gpu) == "is Torch's kernel for the CPU, and not for sm90"


def test_a_fusion_point_makes_scored_attention_and_its_gradient() -> None:
    learned = {"bias": {"shape": ["heads", 4], "init": 0}}
    layer = {**ATTENTION, "score": "s + bias[h, min(i - j, 3)]", "sinks": True, "learn": learned}
    programs = pipeline.run(tiny(layers=(layer, MLP), fuse=({"blocks.*.attention": ["y"]},)), "cpu")
    (group,) = programs.groups
    assert str(group.forward.nodes[0]) == (
        "attention.y = scored_attention(q, k, v, sinks, bias)"
        "{score='s + bias[h, min(i - j, 3)]', tables=('bias',), sinks=True} : f32[B,T,2,4], f32[B,2,T]"
    )
    assert [label for label, _ in group.backward.outputs] == ["d_q", "d_k", "d_v", "d_sinks", "d_bias"]


def test_a_score_that_is_s_gives_the_kernels_of_causal_attention() -> None:
    point = ({"blocks.*.attention": ["y"]},)
    wanted = pipeline.run(tiny(fuse=point), "cpu")
    for change in ({"score": "s + 0 * i"}, {"mask": "i >= j"}, {"scale": "1/sqrt(head_dim)"}):
        result = pipeline.run(tiny(layers=({**ATTENTION, **change}, MLP), fuse=point), "cpu")
        assert [str(graph) for graph in result.graphs] == [str(graph) for graph in wanted.graphs]


def test_generated_files_are_the_same_for_equal_expressions(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        written(SCORED_TORCH, site_of("tables", False), tmp_path / folder)
    (first,), (second,) = (list((tmp_path / folder).glob("scored*")) for folder in ("a", "b"))
    assert first.read_text() == second.read_text()
