"""Large specs are verified at a small size, with every mechanism that they have."""

from typing import Any

import pytest
from tiny_models import ATTENTION, MLP, tiny

from specc.compiler.spec.spec import Spec
from specc.runtime.verify import reduced as module
from specc.runtime.verify.reduced import reduced
from specc.runtime.verify.verify import verify


def large(count: int = 8, **blocks: Any) -> Spec:
    """A spec of 201 million parameters, nearly all in its table."""
    return tiny((ATTENTION, MLP), count=count, vocab=150_000, dim=1344, blocks=blocks)


def test_a_small_spec_is_verified_as_it_is() -> None:
    assert reduced(tiny()) is None


def test_one_layer_per_distinct_block_remains() -> None:
    spec = large(
        changes=[
            {"where": "layer % 3 == 2", "attention": {"qk_norm": {}}},
            {"where": "layer == 7", "mlp": {"hidden": 6}},
        ]
    )
    small = reduced(spec)
    assert small is not None
    assert small.model.vocabulary == 1024
    assert small.model.blocks.every == tuple(spec.model.blocks.every[layer] for layer in (0, 2, 7))


def test_equal_blocks_leave_two() -> None:
    small = reduced(large())
    assert small is not None and small.model.blocks.count == 2


def test_blocks_that_name_other_layers_all_remain() -> None:
    spec = large(changes=[{"where": "layer == 6", "read": "x + output(5)"}])
    small = reduced(spec)
    assert small is not None
    assert (small.model.blocks.count, small.model.vocabulary) == (8, 1024)


def test_ids_of_a_reduced_spec_are_in_its_vocabulary() -> None:
    spec = tiny(({**ATTENTION, "bos": 149_999}, MLP), vocab=150_000, dim=1344)
    small = reduced(spec)
    assert small is not None and small.model.blocks.layers[0].bos == 1023


def test_verify_loads_the_full_size_and_checks_the_values_of_the_reduced_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", 1000)
    spec = tiny(count=5, vocab=2000)
    checks = list(verify(spec, ("cpu",)))
    assert all(check.ok for check in checks)
    assert checks[0].name == "full size" and checks[0].detail.startswith("builds and loads, 18,240 parameters in 31")
    assert {"causality", "loss against float64", "cached equals uncached"} <= {check.name for check in checks}
