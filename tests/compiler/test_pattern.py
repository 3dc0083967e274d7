"""Name patterns."""

import fnmatch
import random
import time

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
        ("{embed.token,*.table}", "embed.token", True),
        ("{embed.token,*.table}", "embed.bigram.table", True),
        ("{embed.token,*.table}", "*.table", True),  # a star is any character
        ("{embed.token,*.table}", "embed.bigram.tables", False),
        ("{embed.token,*.table}", "embedxtoken", False),
        ("blocks.{0,1*}.{up,d*n}", "blocks.17.mlp.down", True),
        ("blocks.{0,1*}.{up,d*n}", "blocks.0.mlp.down", False),
        ("blocks.{0,1*}.{up,d*n}", "blocks.0.down", True),
        ("{*}", "a.b", True),
        ("{,*.}up", "blocks.0.up", True),
        ("{a", "{a", True),  # a brace alone is a brace
        ("{a,*", "{a,b", True),
        ("{a{b,c}", "{ac", True),
    ],
)
def test_patterns(pattern: str, name: str, covered: bool) -> None:
    assert matches(pattern, name) is covered


@pytest.mark.parametrize("seed", range(200))
def test_choices_are_the_patterns_that_they_stand_for(seed: int) -> None:
    """`x{p,q}y` covers what `xpy` or `xqy` covers, stars inside or out."""
    rng = random.Random(seed)
    before, *choices, after = ("".join(rng.choice("ab.*") for _ in range(rng.randint(0, 2))) for _ in range(5))
    name = "".join(rng.choice("ab.") for _ in range(rng.randint(0, 5)))
    one_by_one = any(matches(before + choice + after, name) for choice in choices)
    assert matches(f"{before}{{{','.join(choices)}}}{after}", name) is one_by_one


@pytest.mark.parametrize("seed", range(200))
def test_stars_agree_with_fnmatch(seed: int) -> None:
    rng = random.Random(seed)
    pattern = "".join(rng.choice("ab.*") for _ in range(rng.randint(0, 6)))
    name = "".join(rng.choice("ab.") for _ in range(rng.randint(0, 8)))
    assert matches(pattern, name) == fnmatch.fnmatchcase(name, pattern)


@pytest.mark.parametrize("text", ["*a", "{*a,*c}", "*{a,c*a}"])
def test_many_stars_take_no_time(text: str) -> None:
    """Forty `*a` as a regular expression backtrack for ever."""
    start = time.process_time()
    assert not matches(40 * text, 200 * "a" + "b")
    assert matches(40 * text, 200 * "a")
    assert time.process_time() - start < 1.0
