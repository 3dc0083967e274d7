"""An edit of one line of a spec changes few lines of the generated module."""

import copy
import difflib
from collections.abc import Callable
from typing import Any

import pytest
from tiny_models import ATTENTION, MLP, spec_data, spec_of

from specc.compiler.build import compile_loaded

Blocks = dict[str, Any]
EDITS: dict[str, tuple[int, Callable[[Blocks], Any]]] = {
    "weights of norms": (10, lambda blocks: blocks.update(norm={"kind": "rms", "weight": "w"})),
    "norms after layers": (12, lambda blocks: blocks.update(norm={"kind": "rms", "places": ["before", "after"]})),
    "parallel layers": (9, lambda blocks: blocks.update(write="x + attention + mlp")),
    "biases of q, k and v": (14, lambda blocks: blocks["layers"][0].update(bias=["q", "k", "v"])),
    "norms of q and k": (20, lambda blocks: blocks["layers"][0].update(qk_norm={"weight": "w"})),
    "base of rotary positions": (2, lambda blocks: blocks["layers"][0]["rope"].update(base=500000)),
    "scaled frequencies": (10, lambda blocks: blocks["layers"][0]["rope"].update(scaling="f / 8")),
    "factor of scores": (13, lambda blocks: blocks["layers"][0].update(scale="1/sqrt(12)")),
    "activation": (2, lambda blocks: blocks["layers"][1].update(act="gelu(x)")),
    "residual factor": (4, lambda blocks: blocks["layers"][1].update(write="x + 0.5 * y")),
    "base of one layer": (
        12,
        lambda blocks: blocks.update(changes=[{"where": "layer == 1", "attention": {"rope": {"base": 1e6}}}]),
    ),
}


def module(data: dict[str, Any]) -> list[str]:
    return compile_loaded(spec_of(data), None, ("cpu",)).files["cpu/model.py"].splitlines()


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_changes_few_lines(name: str) -> None:
    base = spec_data(({**ATTENTION, "rope": {"base": 10000}}, MLP), fuse=(), count=4)
    edited = copy.deepcopy(base)
    most, edit = EDITS[name]
    edit(edited["model"]["blocks"])
    lines = list(difflib.unified_diff(module(base), module(edited), n=0, lineterm=""))
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert 0 < len(changed) <= most, "\n".join(changed)
