"""The section on scores and masks: each layer of its list builds, and decodes as it scores."""

import re
from pathlib import Path

import pytest
import yaml
from tiny_models import MLP, tiny

from specc.runtime.verify.verify import verify

PAGE = (Path(__file__).parents[2] / "docs" / "writing-a-spec.md").read_text()
SECTION = re.search(r"^## Scores and masks\n.*?```yaml\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
assert SECTION is not None
LAYERS = yaml.safe_load(SECTION[1])


@pytest.mark.parametrize("number", range(len(LAYERS)))
def test_a_layer_of_the_list_holds(number: int) -> None:
    spec = tiny(layers=(LAYERS[number], MLP), dim=32, fuse=({"blocks.*.attention": ["y"]},), context=40)
    names = ("cached equals uncached", "causality", "packed documents equal single documents", "fused")
    results = [check for check in verify(spec, ("cpu",)) if check.name in names or check.name.startswith("attend_")]
    assert len(results) >= 3 and all(check.ok for check in results), results
