"""Name patterns."""

import fnmatch
import random

import pytest

from specc.compiler.pattern import matches


@pytest.mark.parametrize(
    ("pattern", "name", "covered"),
    [
        ("*", "blocks.3.mlp.up", True),
        ("*", "", True),
        ("blocks.*.mlp", "blocks.3.mlp", True),
        ("blocks.*.mlp", "blocks.3.mlp.up", False),
        ("blocks.*.mlp", "blocks.a.b.mlp", True),  # dots included
        ("blocks.*.{up,down}", "blocks.3.mlp.up", True),
        ("blocks.*.{ up , down }", "blocks.3.mlp.down", True),
        ("blocks.*.{up,down}", "blocks.3.mlp.gate", False),
        ("*.{residual,scale}", "residual", False),
        ("blocks.1", "blocksx1", False),  # a dot is a dot
        ("blocks.[01].mlp", "blocks.1.mlp", False),  # and a bracket a bracket
        ("a+", "aa", False),
        ("a+", "a+", True),
        ("embed.token", "embed.token2", False),
        ("{a,b}.{c,d}", "b.c", True),
        ("{a.b,c}", "a.b", True),
        ("{a.b,c}", "axb", False),
        ("*a*", "bab", True),
        ("UP", "up", False),
        ("a\n", "a", False),
    ],
)
def test_patterns(pattern: str, name: str, covered: bool) -> None:
    assert matches(pattern, name) is covered


@pytest.mark.parametrize("seed", range(200))
def test_stars_agree_with_fnmatch(seed: int) -> None:
    rng = random.Random(seed)
    pattern = "".join(rng.choice("ab.*") for _ in range(rng.randint(0, 6)))
    name = "".join(rng.choice("ab.") for _ in range(rng.randint(0, 8)))
    assert matches(pattern, name) == fnmatch.fnmatchcase(name, pattern)
