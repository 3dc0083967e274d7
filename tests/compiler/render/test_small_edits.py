"""An edit of one line of a spec changes few lines of the generated module."""

import copy
import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import ATTENTION, MLP, spec_data, spec_of

from specc.compiler.build import compile_loaded, compile_spec
from specc.compiler.passes.select_kernels import together

SPEC = Path(__file__).parents[3] / "specs" / "gpt_mlp35.yaml"

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


def test_value_embeddings_in_other_blocks_change_no_kernel() -> None:
    moved = "model.blocks.changes.1.where=layer == 8 or layer == 9"
    base, edited = (compile_spec(SPEC, overrides, ("sm90",)).files for overrides in ((), (moved,)))
    assert base.keys() == edited.keys()
    assert [path for path in base if base[path] != edited[path]] == ["sm90/model.py", "PLAN.md", "manifest.json"]
    pairs = zip(base["sm90/model.py"].splitlines(), edited["sm90/model.py"].splitlines(), strict=True)
    assert sum(old != new for old, new in pairs) == 1


def test_labels_that_a_pattern_covers_are_left_out() -> None:
    assert together(["blocks.*.attention.y", "blocks.9.attention.y"]) == "blocks.*.attention.y"
    assert together(["blocks.9.mlp.up + act", "blocks.*.mlp.up + act"]) == "blocks.*.mlp.up + act"
    assert together(["blocks.*.mlp.up", "blocks.9.mlp.up + act"]) == "blocks.*.mlp.up and blocks.9.mlp.up + act"
    assert together(["a.q.rope", "a.k.rope"]) == "a.{q,k}.rope"
