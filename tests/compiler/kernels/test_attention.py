"""Attention as a choice of kernels: what the fusion takes, what each kernel refuses, what the CPU's kernel computes."""

import itertools
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_sites import SHAPES, attention_site, by_formula, relative, several
from kernel_sites import check_clean, check_outputs, empty, imported, written
from tiny_models import ATTENTION, MLP, tiny
from torch import Tensor

from specc.compiler import kernels, pipeline
from specc.compiler.build import model_files
from specc.compiler.catalog import catalog
from specc.compiler.kernels.attention import attention
from specc.compiler.kernels.attention.torch import ATTENTION_GRAD_TORCH, ATTENTION_TORCH
from specc.compiler.kernels.kernel import Kernel, Site, missing, symbol
from specc.compiler.ops.attention import Sdpa
from specc.compiler.ops.saved_attention import CausalAttention, CausalAttentionGrad
from specc.compiler.plan.lock import NO_LOCK, Entry, Lock, Machine
from specc.compiler.plan.plan import Plan
from specc.compiler.programs.programs import LoweringError
from specc.compiler.report.plan_page import plan_page
from specc.compiler.report.summary import Summary
from specc.compiler.spec.spec import Spec
from specc.compiler.targets import TARGETS
from specc.runtime.bench.plain import plain_site
from specc.runtime.model.load import instantiate
from specc.runtime.tune.candidates import candidates
from specc.runtime.tune.measure import refusal
from specc.runtime.tune.prepare import prepare
from specc.runtime.verify.judge import Judge, inputs_of, sizes_of

ROOT = Path(__file__).parents[3]
MACHINE = Machine(gpu="NVIDIA H200", driver="580", torch="2.11.0", triton="3.6.0", cuda="13.0")
POINT = {"blocks.*.attention": ["y"]}
GROUPED = {**ATTENTION, "heads": 4, "kv_heads": 2, "qk_norm": {"gain": 1.5}, "rope": {"dims": 4}}
EVERY = {
    name: kernel
    for name, kernel in catalog(kernels, Kernel).items()
    if kernel.computes in (CausalAttention, CausalAttentionGrad)
}
GPU = {name: kernel for name, kernel in EVERY.items() if isinstance(kernel, attention.AttentionKernel)}


def spec(*points: dict[str, list[str]], layers: Any = (GROUPED, MLP), **words: Any) -> Spec:
    return tiny(layers=layers, fuse=points or (POINT,), **{"dim": 32, **words})


def takes(kernel: Kernel, site: Site) -> bool:
    return isinstance(site.node.op, kernel.computes) and not missing(kernel, site.target) and not kernel.rejects(site)


# --- the fusion ---


def test_attention_gives_what_its_gradient_reads() -> None:
    programs = pipeline.run(spec(), "cpu")
    (group,) = programs.groups
    assert (group.name, group.scope, group.saved) == ("fused_attention", "attention", ("q", "k", "v", "y", "lse"))
    assert str(group.forward) == (
        "graph fused_attention.forward(q: f32[B,T,4,8], k: f32[B,T,2,8], v: f32[B,T,2,8]) {\n"
        "  attention.y = causal_attention(q, k, v) : f32[B,T,4,8], f32[B,4,T]\n"
        "  return y=attention.y, lse=attention.y:1\n"
        "}"
    )
    assert str(group.backward) == (
        "graph fused_attention.backward(d: f32[B,T,4,8], q: f32[B,T,4,8], k: f32[B,T,2,8], v: f32[B,T,2,8], "
        "y: f32[B,T,4,8], lse: f32[B,4,T]) {\n"
        "  attention.y.grad = causal_attention_grad(d, q, k, v, y, lse) : f32[B,T,4,8], f32[B,T,2,8], f32[B,T,2,8]\n"
        "  return d_q=attention.y.grad, d_k=attention.y.grad:1, d_v=attention.y.grad:2\n"
        "}"
    )
    for name in ("prefill", "decode"):
        assert not any(node.op.name == "fused" for node in programs.program(name).nodes)


@pytest.mark.parametrize(
    ("layers", "point", "reason"),
    [
        (
            (GROUPED, MLP),
            {"blocks.*.attention": ["y", "out"]},
            "the fusion attention takes a single attention node; attention.y.merged is a member too",
        ),
    ],
)
def test_what_is_refused_says_why(layers: Any, point: dict[str, list[str]], reason: str) -> None:
    with pytest.raises(LoweringError) as caught:
        pipeline.run(spec(point, layers=layers), "cpu")
    assert reason in str(caught.value)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_references_are_the_formulas(shape: tuple[int, int, int]) -> None:
    heads, groups, channels = shape
    generator = torch.Generator().manual_seed(3)

    def random_heads(count: int) -> Tensor:
        return torch.randn(2, 6, count, channels, generator=generator, dtype=torch.float64)

    dy, q, k, v = (random_heads(count) for count in (heads, heads, groups, groups))
    y, lse = CausalAttention().reference(q, k, v)
    dq, dk, dv = CausalAttentionGrad().reference(dy, q, k, v, y, lse)
    torch.testing.assert_close(y, Sdpa().reference(q, k, v), rtol=1e-13, atol=1e-13)
    wanted = [torch.zeros_like(value) for value in (y, lse, dq, dk, dv)]
    for b, h in itertools.product(range(2), range(heads)):
        g = h * groups // heads
        parts = by_formula(dy[b, :, h], q[b, :, h], k[b, :, g], v[b, :, g])
        wanted[0][b, :, h], wanted[1][b, h], wanted[2][b, :, h] = parts[:3]
        wanted[3][b, :, g] += parts[3]
        wanted[4][b, :, g] += parts[4]
    for result, want in zip((y, lse, dq, dk, dv), wanted, strict=True):
        torch.testing.assert_close(result, want, rtol=1e-11, atol=1e-12)


# --- kernels ---


@pytest.mark.parametrize("backward", [False, True])
def test_every_target_has_one_by_rule_that_needs_no_package(backward: bool) -> None:
    first = {"cpu": "attention_torch", "sm90": "cudnn_attention", "sm100": "cudnn_attention"}
    for target in TARGETS:
        site = attention_site(backward=backward, target=target, dtype=TARGETS[target].dtype)
        best = min((k for k in EVERY.values() if takes(k, site)), key=lambda k: (k.rank(site), k.name))
        want = first.get(target, "flash_attention")
        assert best.name == (
            {"attention_torch": "attention_grad_torch"}.get(want, f"{want}_grad") if backward else want
        )
        assert best.made_of != "flash-attn-4"


def test_refusals_say_why_with_numbers() -> None:
    def reason(name: str, **words: Any) -> str | None:
        return EVERY[name].rejects(attention_site(backward="grad" in name, **words))

    for name, kernel in GPU.items():
        assert reason(name) is None and isinstance(kernel, attention.AttentionKernel)
        widest = kernel.by.widest
        assert reason(name, dtype="f32") == "computes in bf16 or f16, not in f32"
        message = f"takes heads of a multiple of {kernel.by.step} channels, at most {widest}; these have"
        assert reason(name, shape=(4, 4, 68)) == f"{message} 68"
        assert reason(name, shape=(4, 4, widest + 8)) == f"{message} {widest + 8}"
        assert reason(name, shape=(4, 4, widest)) is None
    assert reason("attention_torch") == "is Torch's kernel for the CPU, and not for sm90"
    ordered = reason("flash_attention_4_grad_ordered", target="sm120")
    assert ordered == "supports sums in a fixed order only on H100, H200 and B200, not on RTX 50"
    assert missing(GPU["flash_attention_4"], TARGETS["sm80"]) == "sm80 has no tma"


@pytest.mark.parametrize("target", ["sm80", "sm86", "sm89", "sm90", "sm100", "sm120"])
@pytest.mark.parametrize("channels", [192, 200, 224, 232, 256])
def test_flash_attention_has_no_gradient_of_some_widths_on_small_gpus(target: str, channels: int) -> None:
    forward, backward = (attention_site((4, 4, channels), which, target) for which in (False, True))
    assert EVERY["flash_attention"].rejects(forward) is None
    answer = EVERY["flash_attention_grad"].rejects(backward)
    if target in ("sm86", "sm89", "sm120") and 192 < channels <= 224:
        words = f"cannot compute the gradient on {TARGETS[target].title} for heads of 193 to 224 channels"
        assert answer == f"{words}; these have {channels}"
    else:
        assert answer is None


def test_random_sites_render_as_clean_python(tmp_path: Path) -> None:
    rng = random.Random(4)
    for i in range(40):
        groups = rng.choice((1, 2, 3, 4, 16))
        shape = (groups * rng.choice((1, 2, 7)), groups, 8 * rng.randint(1, 16))
        site = attention_site(
            shape, rng.random() < 0.5, rng.choice(("sm80", "sm90", "sm120")), rng.choice(("bf16", "f16")), context=64
        )
        for name, kernel in EVERY.items():
            if isinstance(site.node.op, kernel.computes):
                written(kernel, site, tmp_path / f"site_{i}_{name}")
    check_clean(tmp_path, 116)


@pytest.mark.parametrize("name", [name for name, kernel in GPU.items() if kernel.made_of != "flash-attn-4"])
def test_ops_state_their_types_without_a_gpu(name: str, tmp_path: Path) -> None:
    site = attention_site(SHAPES["golf"], "grad" in name)
    op = getattr(imported(EVERY[name], site, tmp_path / f"fake_{name}"), symbol(site)[0])
    check_outputs(op(*(empty(type, B=3, T=5) for type in site.inputs)), site, B=3, T=5)
    with pytest.raises(ValueError, match=r"is torch.bfloat16 .* on cpu; expected torch.bfloat16 .* on one GPU"):
        op(*(empty(type, "cpu", B=3, T=5) for type in site.inputs))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_of_the_cpu_is_as_exact_as_plain_torch(shape: tuple[int, int, int], tmp_path: Path) -> None:
    for backward, kernel in ((False, ATTENTION_TORCH), (True, ATTENTION_GRAD_TORCH)):
        site = attention_site(shape, backward, "cpu", "f32")
        name = f"cpu_{'_'.join(map(str, shape))}_{backward}"
        function = getattr(imported(kernel, site, tmp_path / name), symbol(site)[0])
        for rows in (1, 7, 64, 129, 301):
            judge = Judge.of(site, inputs_of(site, sizes_of(site, rows), "cpu", seed=rows))
            result = judge.call(function)
            assert all(error.ok for error in judge.errors(result)), judge.errors(result)
        q, k, v = inputs_of(attention_site(shape, False, "cpu", "f32"), {"B": 3, "T": 1}, "cpu")
        if not backward:  # one token sees itself: its value, and its own score
            y, lse = function(q, k, v)
            shared = shape[0] // shape[1]
            torch.testing.assert_close(y, v.repeat_interleave(shared, 2))
            score = (q * k.repeat_interleave(shared, 2)).sum(-1) / shape[2] ** 0.5
            torch.testing.assert_close(lse, score.transpose(1, 2))


def test_inputs_of_a_gradient_belong_together() -> None:
    site = attention_site(SHAPES["golf"], True)
    dy, q, k, v, y, lse = inputs_of(site, {"B": 2, "T": 9}, "cpu")
    want, sums = CausalAttention().reference(*(value.double() for value in (q, k, v)))
    assert relative(y, want) < 4e-3 and relative(lse, sums) < 1e-6
    assert (y.dtype, lse.dtype, dy.shape) == (torch.bfloat16, torch.float32, q.shape)
    assert sizes_of(site, 1) == {"B": 2, "T": 16, "S": 16} and sizes_of(site, 129)["T"] == 129


def test_other_bits_are_refused_where_they_were_not_announced() -> None:
    site = attention_site((1, 1, 8), False, "cpu", "f32")
    judge = Judge.of(site, inputs_of(site, {"B": 2, "T": 6}, "cpu"))
    calls = itertools.count()

    def flickering(*inputs: Tensor) -> tuple[Tensor, ...]:
        y, lse = several(site.node.op.reference(*inputs))
        return y, lse.nextafter(torch.tensor(torch.inf)) if next(calls) % 2 else lse

    assert refusal(judge, flickering, deterministic=False) is None
    assert refusal(judge, flickering) == "returns different bits when called again"
    wrong: Callable[..., Any] = lambda *inputs: (2 * inputs[0], flickering(*inputs)[1])  # noqa: E731
    assert "RMS error" in (refusal(judge, wrong, deterministic=False) or "")


def test_those_that_add_up_in_any_order_are_marked() -> None:
    marked = {name for name, kernel in EVERY.items() if not kernel.deterministic}
    assert marked == {"cudnn_attention_grad", "flash_attention_grad", "flash_attention_4_grad"}
    site = attention_site(backward=True)
    for kernel in (k for k in GPU.values() if takes(k, site)):
        (context,) = (context for _, context in kernel.render(site).files.values())
        assert ("the same bits" in context.repeats) == kernel.deterministic  # type: ignore[attr-defined]


# --- plans and locks ---


WIDE = 256  # four heads of 64, which every library takes


def plan(lock: Lock = NO_LOCK, target: str = "sm90") -> Plan:
    return pipeline.plan(spec(targets=("cpu", target), dim=WIDE), target, "specs/x.yaml", lock)


def locked(**names: str) -> Lock:
    """A lock that has measured kernels for forward and gradient fastest."""
    lock = NO_LOCK
    for choice, name in zip(plan().listed, (names["forward"], names["backward"]), strict=True):
        entry = Entry(node=choice.site.label, key=choice.site.key, kernel=name, rows=24, ms=0.25, floor_ms=0.125)
        lock = lock.with_measured("sm90", MACHINE, {choice.rendered.module: entry})
    return lock


def test_forward_and_gradient_are_chosen_each_for_itself() -> None:
    mixed = plan(locked(forward="cudnn_attention", backward="flash_attention_4_grad"))
    assert [choice.kernel.name for choice in mixed.listed] == ["cudnn_attention", "flash_attention_4_grad"]
    files = model_files(mixed)
    assert "_cudnn_attention(" in files["causal_attention__h4_g2_c64.py"]
    assert "flash_attn" not in files["causal_attention__h4_g2_c64.py"]
    assert "deterministic=False" in files["causal_attention_grad__h4_g2_c64.py"]
    rows = [
        line for line in plan_page(Summary(spec(dim=WIDE), {"sm90": mixed}, {})).splitlines() if "attention.y" in line
    ]
    assert "causal_attention__h4_g2_c64.py (cuDNN) | 0.25 x " in rows[0]
    assert "causal_attention_grad__h4_g2_c64.py (flash-attn-4, not deterministic) | 0.25 x " in rows[1]


def test_everything_that_a_target_can_run_is_a_candidate() -> None:
    results = {
        choice.rendered.module: {candidate.kernel.name for candidate in candidates(choice.site, "specs/x.yaml")}
        for choice in plan().generated
    }
    assert results == {
        "causal_attention__h4_g2_c64": {"cudnn_attention", "flash_attention", "flash_attention_4", "short_attention"},
        "causal_attention_grad__h4_g2_c64": {
            "cudnn_attention_grad",
            "flash_attention_grad",
            "flash_attention_grad_ordered",
            "flash_attention_4_grad",
            "flash_attention_4_grad_ordered",
            "short_attention_grad",
        },
    }
    digests = [c.digest for choice in plan().generated for c in candidates(choice.site, "")]
    assert len(set(digests)) == len(digests)


@pytest.fixture
def without_flash_4(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, None)


def test_a_model_that_needs_a_package_says_so_when_it_is_loaded(
    tmp_path: Path, without_flash_4: None, capsys: pytest.CaptureFixture[str]
) -> None:
    from specc.cli.app import failed
    from specc.cli.output import Output

    lock = locked(forward="flash_attention_4", backward="cudnn_attention_grad")
    with pytest.raises(
        ModuleNotFoundError, match=r"blocks\.\*\.attention\.y was measured fastest with flash-attn-4"
    ) as e:
        instantiate(spec(targets=("sm90",), dim=WIDE), "sm90", tmp_path, lock=lock)
    assert "pip install 'specc[flash]'" in str(e.value) and "specc tune" in str(e.value)
    assert failed(e.value, Output()) == 3
    assert "specc[flash]" in capsys.readouterr().err
    instantiate(spec(targets=("sm90",), dim=WIDE), "sm90", tmp_path / "rule")  # by rule nothing is needed


def test_a_missing_package_says_nothing_lasting_of_a_kernel(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("import a_package_that_nobody_has\n")
    (done,) = prepare([(0, tmp_path)], "kernel", "kernel", attention_site())
    assert not done.lasting and "a_package_that_nobody_has" in (done.reason or "")


def test_a_benchmark_sets_it_beside_what_torch_itself_would_take(tmp_path: Path) -> None:
    function = plain_site(attention_site(SHAPES["golf"]))
    with pytest.raises(ValueError, match="on one GPU"):  # cuDNN's, and not the CPU's
        function(*inputs_of(attention_site(SHAPES["golf"]), {"B": 1, "T": 3}, "cpu"))
    y, _ = plain_site(attention_site(SHAPES["golf"], target="cpu", dtype="f32"))(*[torch.ones(1, 3, 8, 64)] * 3)
    torch.testing.assert_close(y, torch.ones_like(y))
