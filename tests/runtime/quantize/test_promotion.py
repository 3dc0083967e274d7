"""Which parameters get more bits."""

from collections.abc import Mapping

import pytest
import torch

from specc.compiler.quant.gptq import Gptq
from specc.compiler.quant.none import Unquantized
from specc.compiler.quant.round import Round
from specc.compiler.quant.scheme import Scheme
from specc.runtime.artifact.artifact import ArtifactContents, measured_bytes
from specc.runtime.artifact.quantized_model import entropy_bytes, quantize_tensors
from specc.runtime.errors import QuantizeError
from specc.runtime.quantize.promotion import promote

BASE: dict[str, Scheme] = {
    "embed.table": Round(bits=8),
    **{f"blocks.{i}.mlp.{part}": Gptq(bits=5, order="natural") for i in range(4) for part in ("up", "down")},
    "head.gain": Unquantized(dtype="f16"),
}
TRACES = {
    "embed.table": 1e9,
    "blocks.0.mlp.up": 7.0,
    "blocks.0.mlp.down": 50.0,
    "blocks.1.mlp.up": 8.0,
    "blocks.1.mlp.down": 40.0,
    "blocks.2.mlp.up": 7.0,
    "blocks.2.mlp.down": 60.0,
    "blocks.3.mlp.up": 9.0,
    "blocks.3.mlp.down": 3.0,
    "head.gain": 1e9,
}
RANKED = [
    "blocks.2.mlp.down",
    "blocks.0.mlp.down",
    "blocks.1.mlp.down",
    "blocks.3.mlp.up",
    "blocks.1.mlp.up",
    "blocks.0.mlp.up",  # equal traces go by name
    "blocks.2.mlp.up",
    "blocks.3.mlp.down",
]


def promoted(chosen: Mapping[str, Scheme], bits: int = 6) -> set[str]:
    """The names that changed; checks that only their width did, and that the order is that of the base."""
    assert list(chosen) == list(BASE)
    changed = {name for name in BASE if chosen[name] != BASE[name]}
    for name in changed:
        assert chosen[name] == BASE[name].model_copy(update={"bits": bits})
    return changed


def sizes(chosen: Mapping[str, Scheme]) -> int:
    """1,000 bytes, and 100 for each int6."""
    return 1000 + 100 * sum(scheme.bits_per_value() == 6 for scheme in chosen.values())


@pytest.mark.parametrize("count", range(9))
def test_the_largest_traces_first(count: int) -> None:
    for traces in (TRACES, dict(reversed(TRACES.items()))):
        got = promote(traces, BASE, count=count, to_bits=6, match=[], budget_bytes=None, measure=None)
        assert promoted(got) == set(RANKED[:count])


def test_match_restricts_the_candidates() -> None:
    got = promote(TRACES, BASE, count=2, to_bits=7, match=["blocks.*.up", "embed.*"], budget_bytes=None, measure=None)
    assert promoted(got, 7) == {"blocks.3.mlp.up", "blocks.1.mlp.up"}
    got = promote(TRACES, BASE, count=1, to_bits=6, match=["blocks.{0,1}.mlp.*"], budget_bytes=None, measure=None)
    assert promoted(got) == {"blocks.0.mlp.down"}


def test_parameters_without_a_trace_or_with_as_many_bits_are_no_candidates() -> None:
    traces = {name: trace for name, trace in TRACES.items() if "down" in name}
    base = {**BASE, "blocks.2.mlp.down": Gptq(bits=7)}
    got = promote(traces, base, count=3, to_bits=6, match=[], budget_bytes=None, measure=None)
    assert {name for name in base if got[name] != base[name]} == {f"blocks.{i}.mlp.down" for i in (0, 1, 3)}
    assert got["blocks.2.mlp.down"] == Gptq(bits=7)


@pytest.mark.parametrize("fits", range(9))
@pytest.mark.parametrize("slack", [-1, 0, 1])
def test_a_budget_is_kept_to_the_byte(fits: int, slack: int) -> None:
    budget = 1000 + 100 * fits + slack
    if budget < 1000:
        with pytest.raises(QuantizeError, match=r"takes 1,000 bytes before any promotion, and the budget is 999"):
            promote(TRACES, BASE, count=None, to_bits=6, match=[], budget_bytes=budget, measure=sizes)
        return
    got = promote(TRACES, BASE, count=None, to_bits=6, match=[], budget_bytes=budget, measure=sizes)
    assert promoted(got) == set(RANKED[: fits + (slack == -1) * -1])
    assert sizes(got) <= budget


def test_count_bounds_the_budget() -> None:
    for count, budget, want in ((3, 10**6, 3), (3, 1250, 2), (99, 10**6, 8)):
        got = promote(TRACES, BASE, count=count, to_bits=6, match=[], budget_bytes=budget, measure=sizes)
        assert promoted(got) == set(RANKED[:want])


def test_it_stops_at_the_first_that_does_not_fit() -> None:
    """A smaller parameter further down the ranking does not jump the queue."""

    def measure(chosen: Mapping[str, Scheme]) -> int:
        return 1000 + sum((500 if name == RANKED[1] else 10) for name in BASE if chosen[name].bits_per_value() == 6)

    got = promote(TRACES, BASE, count=None, to_bits=6, match=[], budget_bytes=1100, measure=measure)
    assert promoted(got) == {RANKED[0]}


def test_mistakes_are_named() -> None:
    with pytest.raises(QuantizeError, match=r"'blocks\.\*\.gate' matches no parameter"):
        promote(TRACES, BASE, count=1, to_bits=6, match=["blocks.*.gate"], budget_bytes=None, measure=None)
    with pytest.raises(QuantizeError, match="asks for 9 parameters at int6, and only 8"):
        promote(TRACES, BASE, count=9, to_bits=6, match=[], budget_bytes=None, measure=None)
    with pytest.raises(ValueError, match="count or a byte budget"):
        promote(TRACES, BASE, count=None, to_bits=6, match=[], budget_bytes=None, measure=None)
    with pytest.raises(ValueError, match="needs a measure"):
        promote(TRACES, BASE, count=None, to_bits=6, match=[], budget_bytes=5, measure=None)


def test_a_real_model_under_a_real_budget() -> None:
    """The measure is the artifact itself: the result fits, and one more promotion would not."""
    generator = torch.Generator().manual_seed(0)
    base: dict[str, Scheme] = {f"b{i}": Gptq(bits=4, clip_quantiles=(1.0,)) for i in range(5)}
    params = {name: torch.randn(32, 48, generator=generator) for name in base}
    hessians = {name: torch.eye(48) * (i + 1) for i, name in enumerate(base)}
    traces = {name: float(h.trace()) for name, h in hessians.items()}

    def measure(chosen: Mapping[str, Scheme]) -> int:
        model = quantize_tensors(params, chosen, hessians)
        return measured_bytes(ArtifactContents(spec=b"{}", layout=model.layout(), tensors=model.tensors), quality=11)

    every = [{**base, **{f"b{i}": Gptq(bits=6, clip_quantiles=(1.0,)) for i in range(5 - n, 5)}} for n in range(6)]
    exact = [measure(chosen) for chosen in every]
    assert exact == sorted(exact)
    for n in range(6):
        for slack in (-1, 0, 1):
            if n == 0 and slack == -1:
                with pytest.raises(QuantizeError, match=f"{exact[0]:,} bytes"):
                    promote(
                        traces,
                        base,
                        count=None,
                        to_bits=6,
                        match=[],
                        budget_bytes=exact[0] - 1,
                        measure=measure,
                    )
                continue
            got = promote(traces, base, count=None, to_bits=6, match=[], budget_bytes=exact[n] + slack, measure=measure)
            assert got == every[n - 1 if slack == -1 else n]


def test_the_quick_estimate_is_close_to_the_artifact() -> None:
    generator = torch.Generator().manual_seed(1)
    schemes: dict[str, Scheme] = {"a": Round(bits=5), "b": Round(bits=6), "c": Unquantized(dtype="f16")}
    normal, wide = torch.randn(2, 256, 512, generator=generator)
    params = {
        "a": normal * torch.exp(0.4 * wide),
        "b": normal + wide,
        "c": torch.randn(64, generator=generator),
    }
    model = quantize_tensors(params, schemes, {})
    exact = measured_bytes(ArtifactContents(spec=b"{}", layout=model.layout(), tensors=model.tensors))
    assert abs(entropy_bytes(model) - exact) < 0.01 * exact
