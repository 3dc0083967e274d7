"""Hostile text in every field of the committed specs that holds text: it is refused, or it stays text.

Each text contains the word `canary`. No identifier of a generated file contains it; comments and strings may.
"""

import ast
import json
import random
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from tiers import Trials, tiers

from specc.compiler.build import canonical, compile_loaded, spec_of
from specc.compiler.errors import SpecError
from specc.compiler.spec.check import load
from specc.compiler.text.source import read

SPECS = sorted((Path(__file__).parents[3] / "specs").glob("*.yaml"))
TEXTS = 200
ENDS = (
    '"', "'", '"""', "'''", "\\", '\\"', "\n", "\r\n", "\u2028", "\x0c", ")", "]", "}", ");", "*/", "/*", "//", "#",
    "--", "{{", "}}", "{%", "%}",
    "{#", "#}", "${", "$(", "`", "%s", "{0}", "\x00", "\x1b[31m", "\u202e", ",", ";", ":", "=",
    "..", "/", "../", "|", "&&", "<", ">", "!", "@", "é", "😀", "",
)  # fmt: skip
CODE = (
    "__import__('os').system('canary')",
    "import os; os.system('canary')",
    "canary()",
    "canary = 1",
    "lambda: canary",
    "exec('canary')",
    "c.__class__.__mro__[canary]",
    'asm volatile("canary");',
    "#include <canary>",
    "system(canary)",
    "x[canary]",
    "touch canary",
    "@canary\ndef f(): pass",
    "raise canary",
)
LITERAL = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)  # comments and strings of C++


def hostile_texts(rng: random.Random) -> list[str]:
    """Texts that end what could surround them: a string, a comment, a call, a tag of a template, a line."""
    texts = [f"{end}{rng.choice(CODE)}{rng.choice(ENDS)}" for end in ENDS]
    while len(texts) < TEXTS:
        start, middle, end = (rng.choice(ENDS) for _ in range(3))
        texts.append(f"{rng.choice(('', 'x', 'x + '))}{start}{middle}{rng.choice(CODE)}{end}")
    return texts


def text_places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of all texts of a spec; a path that ends with None stands for the key before it."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield (*path, key, None)
            yield from text_places(inner, (*path, key))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from text_places(inner, (*path, i))
    elif isinstance(value, str):
        yield path


def replaced(data: Any, path: tuple[Any, ...], text: str) -> Any:
    data = deepcopy(data)
    *outer, last = path[:-1] if path[-1] is None else path
    holder = data
    for part in outer:
        holder = holder[part]
    holder[text if path[-1] is None else last] = holder.pop(last) if path[-1] is None else text
    return data


def is_code(name: str, content: str) -> bool:
    """Returns whether a file has `canary` anywhere but in comments and strings."""
    if name.endswith(".py"):
        return any(
            "canary" in str(value)
            for node in ast.walk(ast.parse(content))
            if not isinstance(node, ast.Constant)
            for _, value in ast.iter_fields(node)
            if isinstance(value, str)
        )
    return name.endswith(".cu") and "canary" in LITERAL.sub("", content)


@pytest.fixture(scope="module")
def places() -> list[tuple[Any, tuple[Any, ...]]]:
    """A spec and a path for each kind of place."""
    kinds: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
    for path in SPECS:
        data = json.loads(json.dumps(read(path).data))
        for place in text_places(data):
            kinds.setdefault(tuple("*" if isinstance(part, int) else part for part in place), (data, place))
    return list(kinds.values())


@tiers("C6", hostile_texts_of_each_field=(1, 200))
def test_hostile_text_is_refused_or_stays_text(trials: Trials, places: list[tuple[Any, tuple[Any, ...]]]) -> None:
    rng = random.Random(6)
    texts = hostile_texts(rng)
    assert len(texts) == TEXTS and len(places) > 100
    accepted = 0
    for data, place in places:
        for text in rng.sample(texts, trials["hostile_texts_of_each_field"]):
            try:
                spec, source = load(json.dumps(replaced(data, place, text)))
                files = compile_loaded(spec, source).files
            except SpecError:
                continue
            accepted += 1
            assert spec_of(canonical(spec)) == spec
            assert [name for name, content in files.items() if is_code(name, content)] == [], (place, text)
            assert json.loads(files["manifest.json"])["files"].keys() == files.keys() - {"manifest.json"}
    assert accepted > 0
