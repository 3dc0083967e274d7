"""The judge accepts outputs that are as exact as eager Torch. It rejects wrong, coarse and unwritten outputs."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from epilogue_sites import FORMS, codes_site
from torch import Tensor

from specc.compiler.build import compile_spec
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.caches.cached_attention import CachedBase
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.plan.plan import Plan
from specc.compiler.programs import reference
from specc.compiler.spec.check import load
from specc.runtime.dtypes import DTYPES
from specc.runtime.model.load import Loaded, instantiate
from specc.runtime.tune.candidates import all_choices, candidates
from specc.runtime.tune.measure import refusal
from specc.runtime.verify import judge as judging
from specc.runtime.verify.judge import MANY, Composed, Errors, Judge, composed, inputs_of, many_sizes, on_domain
from specc.runtime.verify.random_inputs import Operands, sizes_of
from specc.runtime.verify.verify import Check, verify

SIZES = {"B": 2, "T": 24, "S": 24}


SPEC = Path(__file__).parents[3] / "specs/gpt_mini.yaml"


@pytest.fixture(scope="module")
def site(plan: Plan) -> Site:
    """The forward of an MLP in bf16: y and slope."""
    return next(c.site for c in plan.choices if c.rendered.module.startswith("linear_leaky"))


@pytest.fixture(scope="module")
def loss_site(plan: Plan) -> Site:
    return next(c.site for c in plan.choices if c.rendered.module.startswith("softmax_loss"))


@pytest.fixture(scope="module")
def judge(site: Site) -> Judge:
    return Judge.of(site, inputs_of(site, SIZES, "cpu"))


def kernel(site: Site, change: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """A kernel that rounds each output once, the first of them changed."""

    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        y, *others = reference.node_value(site.node, [value.double() for value in inputs])
        return (change(y.bfloat16()), *(other.bfloat16() for other in others))

    return call


def test_a_sound_kernel_passes(site: Site, judge: Judge) -> None:
    assert refusal(judge, kernel(site, lambda y: y)) is None


@pytest.mark.parametrize("form", FORMS)
def test_exact_values_pass_where_the_epilogue_has_f32_operands(form: str) -> None:
    """Eager Torch computes such an epilogue in f32, but the kernel rounds its results to the types of the node."""
    site = codes_site(form, True, "sm90", 40, 24, "bf16")
    inputs = inputs_of(site, {"T": 200}, "cpu")
    judge = Judge.of(site, inputs)
    exact = reference.node_value(site.node, [value.double() for value in inputs])
    values = [value.to(DTYPES[type.dtype]) for value, type in zip(exact, site.node.types, strict=True)]
    assert [errors.words for errors in judge.errors(values) if not errors.ok] == []


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y * 1.01,
        lambda y: torch.empty_like(y),  # not written: the judge's memory is full of NaN
        lambda y: y[:, :1],  # would broadcast
        lambda y: torch.where(y == y.amax(), torch.inf, y),
        lambda y: y.to(torch.float8_e4m3fn).bfloat16(),
    ],
    ids=["off", "unwritten", "shape", "one infinite", "coarse"],
)
def test_wrong_outputs_are_refused(site: Site, judge: Judge, change: Callable[[Tensor], Tensor]) -> None:
    assert "output 0 has" in (refusal(judge, kernel(site, change)) or "")


def test_other_bits_the_next_time_are_refused(site: Site, judge: Judge) -> None:
    calls: list[None] = []

    def flicker(y: Tensor) -> Tensor:
        calls.append(None)
        return y if len(calls) < 50 else y.nextafter(torch.tensor(torch.inf, dtype=y.dtype))

    assert refusal(judge, kernel(site, flicker)) == "returns different bits when called again"
    assert len(calls) == 50


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as a device with one multiprocessor."""
    monkeypatch.setattr(judging, "multiprocessors", lambda device: 1)


def test_every_multiprocessor_gets_several_tiles_of_every_candidate(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert many_sizes(plan.choices[0].site, "cpu") is None
    monkeypatch.setattr(judging, "multiprocessors", lambda device: 132)
    tiled = 0
    for choice in all_choices(plan):
        sizes = many_sizes(choice.site, "cuda")
        assert sizes is not None
        if isinstance(choice.site.node.op, CachedBase):  # of a step of decoding, each text has one query
            assert sizes["T"] == 1 and sizes["B"] * sizes["S"] > 132
            continue
        assert sizes["T"] == sizes["S"]
        rows, types = sizes["B"] * sizes["T"], (*choice.site.inputs, *choice.site.node.types)
        assert sum(type.bytes(sizes) for type in types) < 2 << 30
        for candidate in candidates(choice.site, ""):
            tile = getattr(candidate.kernel, "tile", None)
            if hasattr(tile, "n"):
                n = choice.site.node.type.width
                assert isinstance(n, int)
                tiles = -(-rows // tile.m) * -(-n // tile.n)
                assert tiles >= 3 * 132 * getattr(tile, "resident", 1) and rows % tile.m
                tiled += 1
    assert tiled > 100


def test_an_error_in_a_later_tile_is_detected(site: Site, judge: Judge, few: None) -> None:
    def late(y: Tensor) -> Tensor:
        flat = y.flatten(0, 1)
        flat[-60:-52] *= 1.5  # what one warp has of one tile
        return y

    def unwritten(y: Tensor) -> Tensor:
        y.flatten(0, 1)[-60] = torch.nan  # a row that is not compared with float64
        return y

    many = Judge.many(site, "cpu")
    assert many is not None and many.sample is not None
    compared = many.sample.rows
    rows = many.inputs[0].shape[:2].numel()
    assert rows > 3 * 256 and rows - 1 in compared and rows - 60 not in compared
    assert len(many.exact[0]) == len(compared) < rows / 6
    assert refusal(many, kernel(site, lambda y: y), deterministic=False) is None
    for change in (late, unwritten, lambda y: y[:, :-1], lambda y: y.flatten(0, 1)):
        assert "output 0 has" in (refusal(many, kernel(site, change), deterministic=False) or "")


def test_only_products_are_compared_by_a_sample(loss_site: Site, few: None) -> None:
    many = Judge.many(loss_site, "cpu")
    assert many is not None and many.sample is None and many.exact[1].shape == many.inputs[0].shape


def test_a_sample_of_a_mean_keeps_the_mean_of_all(loss_site: Site) -> None:
    """A bench has 65,536 rows of 50,304 logits, of which float64 has no room for all."""
    inputs = inputs_of(loss_site, {"B": 3, "T": 343}, "cpu")
    whole, some = (Judge.of(loss_site, inputs, sample) for sample in (False, True))
    assert some.sample is not None and len(some.exact[1]) == len(some.sample.rows) == 148
    assert torch.equal(some.exact[0], whole.exact[0]) and some.bars[0] == whole.bars[0]
    torch.testing.assert_close(some.exact[1], whole.exact[1].flatten(0, 1)[some.sample.rows], rtol=1e-14, atol=0)
    assert some.bars[1][0] == pytest.approx(whole.bars[1][0], rel=0.05)
    loss, grad = reference.node_value(loss_site.node, list(inputs))
    assert all(error.ok for error in some.errors((loss, grad)))
    scaled = grad * (len(inputs[0][0]) / len(some.sample.rows))  # of a mean over the sample
    late = grad.clone()
    late[-1, -1] *= 1.1
    coarse = grad.to(torch.float8_e5m2).bfloat16()
    for other in (scaled, late, coarse, grad[:2], grad.flatten(0, 1)):
        assert [error.ok for error in some.errors((loss, other))] == [True, False]
    assert not some.errors((loss * 1.001, grad))[0].ok


@pytest.mark.parametrize("name", ["gpt2_124m", "poly_transformer"])
@pytest.mark.parametrize("part", ["attention__", "attention_grad__"])
def test_a_sample_of_attention_is_of_sequences(name: str, part: str) -> None:
    """For causal, bidirectional and cross attention."""
    plan = compile_spec(SPEC.with_name(f"{name}.yaml"), (), ("sm90",)).plans["sm90"]
    for site in {c.rendered.module: c.site for c in plan.choices if part in c.rendered.module}.values():
        _sampled(site)


def _sampled(site: Site) -> None:
    inputs = inputs_of(site, {"B": 9, "T": 24, "S": 20}, "cpu")
    whole, some = (Judge.of(site, inputs, sample) for sample in (False, True))
    result = reference.node_value(site.node, list(inputs))
    for few, every, value in zip(some.exact, whole.exact, result, strict=True):
        assert value.shape == every.shape and torch.equal(few, every[[0, 7, 8]])
    assert all(error.ok for error in (*some.errors(result), *whole.errors(result)))
    relative = some.relative(some.errors(result))
    assert 0 < relative.generated <= relative.eager < 0.02 and relative.exact == "float64"
    for i, value in enumerate(result):
        coarse = value.to(torch.float8_e4m3fn).to(value.dtype)
        for wrong in (coarse, value[:3], value.where(torch.arange(value.numel()).view(value.shape) != 9, torch.nan)):
            errors = some.errors([*result[:i], wrong, *result[i + 1 :]])
            assert [error.ok for error in errors] == [k != i for k in range(len(result))]


def gain_grad(*overrides: str, target: str = "sm90") -> Site:
    """The gradients of a rotation with gains: dx, and the sum of all rows for each head."""
    plan = compile_spec(SPEC, overrides, (target,)).plans[target]
    return next(c.site for c in plan.choices if c.site.node.op.name == "norm_rope_grad")


def test_a_sum_over_all_rows_is_compared_whole() -> None:
    """Of a sample of sequences: a correct kernel sums over all sequences."""
    site = gain_grad()
    inputs = inputs_of(site, {"B": 9, "T": 24, "S": 24}, "cpu")
    whole, some = (Judge.of(site, inputs, sample) for sample in (False, True))
    assert some.sample is not None and len(some.exact[0]) == 3
    assert torch.equal(some.exact[1], whole.exact[1]) and some.bars[1] == whole.bars[1]
    dx, dgain = (value.bfloat16() for value in reference.node_value(site.node, [value.double() for value in inputs]))
    assert all(error.ok for error in some.errors((dx, dgain)))
    for wrong in (dgain * 1.03, dgain * (3 / 9), dgain.flip(0), dgain[:2]):
        assert [error.ok for error in some.errors((dx, wrong))] == [True, False]


def test_a_sum_of_one_number_is_held_to_the_size_of_its_terms() -> None:
    """Plain Torch may be exact by chance: a ratio of errors then says nothing, and a wrong sum is still seen."""
    site = gain_grad("model.blocks.layers.0.heads=1", "model.blocks.layers.0.kv_heads=1", target="cpu")
    measured = Judge.of(site, inputs_of(site, {"B": 2, "T": 64, "S": 64}, "cpu"))
    judge = replace(measured, bars=[measured.bars[0], (1e-12, 1e-12)])
    dx, dgain = judge.exact
    bound = judge.rounding_of_sum(1, torch.float32)
    assert dgain.shape == (1, 1) and measured.bars[1][0] < 10 * bound < 1e-3 * abs(float(dgain))
    for share, good in ((0.9, True), (-0.9, True), (2.5, False), (float("nan"), False)):
        assert [error.ok for error in judge.errors((dx.float(), dgain + share * bound))] == [True, good]


def test_the_error_of_few_numbers_may_be_a_unit_of_their_dtype() -> None:
    assert Composed(5e-3, 1e-6).ok(torch.bfloat16, count=1) and not Composed(5e-3, 1e-6).ok(torch.bfloat16, count=99)
    assert not Composed(2e-2, 1e-6).ok(torch.bfloat16, count=1) and not Composed(5e-5, 1e-6).ok(torch.float32, count=2)
    assert Composed(5e-5, 1e-5).ok(torch.float32, count=2) and not Composed(float("nan"), 1.0).ok(
        torch.float32, count=1
    )


def test_an_op_with_tables_of_positions_is_sampled_by_sequences(plan: Plan) -> None:
    site = next(c.site for c in plan.choices if c.rendered.module.startswith("norm_rotary__"))
    inputs = inputs_of(site, {"B": 8, "T": 24, "S": 24}, "cpu")
    judge = Judge.of(site, inputs, sample=True)
    result = reference.node_value(site.node, list(inputs))
    assert all(len(value) == 2 for value in judge.exact if value.dim() > 1)
    assert all(error.ok for error in judge.errors(result))


def test_kernels_together_may_round_intermediate_values() -> None:
    exact = torch.randn(64, 32, dtype=torch.float64)
    chain = (exact + 1e-3 * torch.randn(64, 32)).float()
    for share, good in ((1.0, True), (1.4, True), (1.6, False), (float("nan"), False)):
        ((seen, ok),) = composed([(exact + share * (chain.double() - exact)).float()], [chain], [exact])
        assert ok == good and seen.eager == pytest.approx(1e-3, rel=0.1) and seen.exact == "float64"
    ((_, ok),) = composed([chain[:1]], [chain], [exact])
    assert not ok


def test_verify_goes_on_to_later_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, _ = load(SPEC, ("model.dim=32", "model.blocks.count=2", "targets=[cpu]"))

    def spoiled(*given: Any, **words: Any) -> Loaded:
        """The kernel is wrong behind its 1,000th row."""
        loaded = instantiate(*given, **words)
        module = vars(sys.modules[type(loaded.model).__module__])
        if (right := module.get("dgrad_mul")) is not None:

            def late(*inputs: Tensor) -> Tensor:
                value: Tensor = right(*inputs)
                value.flatten(0, 1)[1000:] *= 2
                return value

            module["dgrad_mul"] = late
        return loaded

    def seen() -> list[Check]:
        return [check for check in verify(spec, ("cpu",)) if check.name.startswith("kernel dgrad")]

    monkeypatch.setattr("specc.runtime.verify.verify.instantiate", spoiled)
    assert [check.ok for check in seen()] == [True], "the CPU's kernels have no tiles"
    monkeypatch.setattr(judging, "multiprocessors", lambda device: 2)
    (check,) = seen()
    assert check.ok is False and check.detail.startswith("rows [1, 7, 64, 129, ") and ", 1715]: " in check.detail


def test_a_bench_takes_the_inputs_of_the_judge(site: Site) -> None:
    """One routine makes the numbers of both, and one makes operands positive where else the value is no number."""
    spec, _ = load(SPEC, ("train.micro_batch=2",))
    tail = Pointwise(("x * sqrt(s)",), ("x", "s"))
    node = replace(site.node, epilogue=tail, inputs=("x", "w", "s"), types=site.node.types[:1])
    site = replace(site, node=node, inputs=(*site.inputs[:2], site.node.types[0]))
    operands = Operands(spec, torch.device("cpu"), seed=3)
    inputs = operands.of(site.node.inputs, site.inputs)
    given = inputs_of(site, sizes_of(spec), "cpu", seed=3)
    assert all(map(torch.equal, inputs[:2], given[:2])) and bool((inputs[2] < 0).any())
    assert torch.equal(given[2], inputs[2].abs()) and torch.equal(on_domain(site, inputs, inputs)[2], given[2])


def test_the_rms_error_of_few_values_depends_on_chance() -> None:
    assert Errors(1.5, 1.5, MANY - 1).ok and Errors(1.0, 1.5, MANY).ok
    assert not Errors(1.5, 1.5, MANY).ok and not Errors(2.1, 1.5, MANY - 1).ok
