"""The judge lets pass what is as exact as plain Torch, and nothing that is wrong, rounded twice, or not written."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specc.compiler import reference
from specc.compiler.build import compile_spec
from specc.compiler.kernels.kernel import Site
from specc.runtime.judge import Judge, inputs_of
from specc.runtime.tune.measure import refusal

SIZES = {"B": 2, "T": 24, "S": 24}


@pytest.fixture(scope="module")
def site() -> Site:
    """The forward of an MLP in bf16: y and slope."""
    plan = compile_spec(Path(__file__).parents[2] / "specs/gpt_mini.yaml", (), ("sm90",)).plans["sm90"]
    return next(c.site for c in plan.choices if c.rendered.module.startswith("linear_leaky"))


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
def test_what_is_wrong_is_refused(site: Site, judge: Judge, change: Callable[[Tensor], Tensor]) -> None:
    assert "output 0 has" in (refusal(judge, kernel(site, change)) or "")


def test_other_bits_the_next_time_are_refused(site: Site, judge: Judge) -> None:
    calls: list[None] = []

    def flicker(y: Tensor) -> Tensor:
        calls.append(None)
        return y if len(calls) < 50 else y.nextafter(torch.tensor(torch.inf, dtype=y.dtype))

    assert refusal(judge, kernel(site, flicker)) == "other bits when it is called again"
    assert len(calls) == 50
