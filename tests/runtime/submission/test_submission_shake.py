"""The code that is cut out of a package, and its substitute for pydantic."""

import ast
import importlib
import json
import random
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest

from specc.compiler.quant.gptq import Gptq
from specc.compiler.spec.train import TrainSpec
from specc.runtime.submission.bundle import _without_comments, quoted, spelled
from specc.runtime.submission.records import BaseModel, Field, ValidationError
from specc.runtime.submission.scopes import shorten
from specc.runtime.submission.shake import ShakeError, Shaker

SOURCES = {
    "p": '"""The package."""\nfrom p.deep import inner\n__all__ = ["inner"]\n',
    "p.deep": (
        "from typing import TYPE_CHECKING\n"
        "import os.path\n"
        "import dead\n"
        "from p.heavy import Heavy\n"
        "if TYPE_CHECKING:\n    from p.never import Never\n"
        "RATE = 2\n"
        "UNUSED = dead.value\n"
        'def inner(x: Heavy) -> Never:\n    """Doc."""\n'
        "    y: int = x * RATE\n    return os.path.join(str(y), late())\n"
        "def late():\n    from p.other import word\n    return word()\n"
    ),
    "p.heavy": "import not_there\nclass Heavy: ...\n",
    "p.never": "import not_there\nclass Never: ...\n",
    "p.other": (
        "from dataclasses import dataclass\nfrom . import names\n"
        "@dataclass\nclass Word:\n    text: Unknown\n    end: str = '!'\n"
        "def word():\n    return Word(names.FIRST).text + Word('').end\n"
    ),
    "p.names": "FIRST = 'a'\nSECOND = missing\n",
    "p.main": "from p import inner\nfrom checker import verdict\ndef main():\n    return inner(21), verdict()\n",
    "p.mine": "def verdict():\n    return 'mine'\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "shaken"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "shaken"


def test_what_is_kept_runs_alone(package: Path) -> None:
    shaker = Shaker("p", SOURCES, {("checker", None): ("p.mine", None)}, "shaken.whole")
    shaker.reach("p.main", "main")
    texts = shaker.texts(("p.main", "main"))
    assert [*texts] == ["whole.py"]
    whole = texts["whole.py"]
    for gone in ("dead", "UNUSED", "Heavy", "Never", "SECOND", "Doc", "Unknown", "TYPE_CHECKING", "import p", "from p"):
        assert gone not in whole
    package.mkdir()
    for name, text in texts.items():
        (package / name).write_text(text)
    assert importlib.import_module("shaken.whole").main() == ("42/a!", "mine")


CLASSES = """
import abc, threading
class Base:
    def used(self): return self._inner()
    def _inner(self): return 1
    def unused(self): return missing
    def __len__(self): return 3
class Child(Base):
    def by_name(self): return 4
    @property
    def late(self): return self.later()
    def later(self): return 5
    def unused_too(self): return missing
class Worker(threading.Thread):
    def run(self): self.result = 6
def main():
    child, worker = Child(), Worker()
    worker.start()
    worker.join()
    return child.used(), len(child), getattr(child, "by_name")(), child.late, worker.result
"""


def test_a_class_is_kept_with_the_methods_that_are_named(package: Path) -> None:
    """By an attribute or a string, also by a method that is included later; all of a class that other packages call."""
    shaker = Shaker("p", {"p": "", "p.main": CLASSES}, {}, "shaken.whole")
    shaker.reach("p.main", "main")
    (text,) = shaker.texts(("p.main", "main")).values()
    package.mkdir()
    (package / "whole.py").write_text(text)
    assert importlib.import_module("shaken.whole").main() == (1, 3, 4, 5, 6)
    assert "unused" not in text and "missing" not in text


NAMES = """
LIMIT = 2
def scaled(value, factor=1, *others, shift=0):
    total = value * factor + shift
    def inside(value):
        nonlocal total
        total += 1
        try:
            return value + total // 0
        except ZeroDivisionError as problem:
            return [part for part in others] + [value, LIMIT, bool(str(problem))]
    return inside(total), f"{total=}"
def spoken(value):
    local = 3
    return locals()["local"] + value
def shadows(LIMIT):
    found = [LIMIT for LIMIT in range(LIMIT)]
    return found, (lambda count: count + len(found))(1)
class Outside(dict):
    def get(self, key, default=None):
        answer = super().get(key, default)
        return answer
"""


def test_short_names_do_not_change_what_code_does() -> None:
    tree = ast.parse(NAMES)
    short = shorten(tree, {"factor", "shift"}, {"Outside"}, {"spoken"})
    assert short.keys() == {"LIMIT", "scaled", "shadows", "Outside"}
    text = ast.unparse(ast.fix_missing_locations(tree))
    for source, new_names in (NAMES, {name: name for name in short}), (text, short):
        bound: dict[str, Any] = {}
        exec(source, bound)
        names = {**bound, **{name: bound[new] for name, new in new_names.items()}}
        assert names["scaled"](2, 3, 9, shift=1) == ([9, 7, 2, True], "total=8")
        assert names["scaled"](2, factor=3)[1] == "total=7"
        assert names["spoken"](4) == 7 and names["shadows"](3) == ([0, 1, 2], 4)
        assert names["Outside"](a=1).get(key="b", default=5) == 5
    assert "factor=1, *" in text and "shift=0)" in text and "def get(self, key, default=None)" in text
    assert "value" not in text.partition("def spoken")[0] and "problem" not in text and "answer" not in text
    assert "local = 3" in text


def test_any_bytes_can_be_quoted() -> None:
    draw = random.Random(1)
    hostile = b"\0\r\n'\\017\"ab\x85\xff\x1a\x0c"
    samples = [bytes(draw.choices(hostile, k=draw.randint(0, 12))) for _ in range(2000)]
    for data in (*samples, bytes(range(256)), draw.randbytes(10_000)):
        names: dict[str, Any] = {}
        source = f"# coding: latin-1\nx='''{quoted(data)}'''".encode("latin-1")
        exec(compile(source, "x", "exec"), names)
        assert names["x"].encode("latin-1") == data


def test_a_symbol_can_be_replaced() -> None:
    replaced = {("p.deep", "late"): ("p.mine", "verdict"), ("checker", None): ("p.mine", None)}
    shaker = Shaker("p", SOURCES, replaced, "shaken.whole")
    shaker.reach("p.main", "main")
    assert "Word" not in shaker.texts()["whole.py"] and "'mine'" in shaker.texts()["whole.py"]


def test_what_cannot_be_followed_is_named() -> None:
    for text, message in [
        ("from p.deep import nothing\ndef main(): return nothing", "p.deep has no nothing"),
        ("from p import names\ndef main(): return vars(names)", "names may only be used to look up a name"),
        ("from . import deep\ndef main(): return vars(deep)", "p.deep may only be used to look up a name"),
    ]:
        with pytest.raises(ShakeError, match=message):
            Shaker("p", {**SOURCES, "p.main": text}, {}, "shaken.whole").reach("p.main", "main")


def test_settings_are_spelled_as_they_are() -> None:
    optimizer = {"kind": "adamw", "match": "*", "lr": 0.1, "betas": [0.8, 0.9]}
    data = {"tokens_per_step": 8, "steps": 3, "optimizers": [optimizer], "average": {"kind": "swa"}}
    for value in (TrainSpec.model_validate_json(json.dumps(data)), Gptq(bits=5, clip_stds=(12.85,))):
        classes: set[type] = set()
        text = spelled({"it": value}, classes)
        assert eval(text, {kind.__name__: kind for kind in classes}) == {"it": value}
    with pytest.raises(TypeError, match="cannot contain a value of type set"):
        spelled({1}, set())


def test_cuda_loses_its_comments_and_nothing_else() -> None:
    text = '// a\nint x = 1\'000; /* b\n c */ char q = \'"\';\n\n    s = "a//b /* \\" */"; // end\n  y / 2;\n'
    assert _without_comments(text) == 'int x = 1\'000;  char q = \'"\';\ns = "a//b /* \\" */";\ny / 2;\n'


class Ranged(BaseModel):
    bits: Annotated[int, Field(ge=4, le=8)]
    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    later: Any = Field(0, exclude_if=lambda value: value == 0)


class Tagged(Ranged):
    tag: str = "t"


def test_the_stand_in_holds_to_ranges_and_names() -> None:
    tagged = Tagged(bits=5)
    assert (tagged.bits, tagged.share, tagged.later, tagged.tag) == (5, 0.5, 0, "t")
    assert tagged == Tagged(bits=5) != Tagged(bits=6) and hash(tagged) == hash(Tagged(bits=5))
    assert tagged != Ranged(bits=5) and tagged.model_dump() == {"bits": 5, "share": 0.5, "tag": "t"}
    assert tagged.model_copy(update={"later": 2}).model_dump() == {"bits": 5, "share": 0.5, "later": 2, "tag": "t"}
    assert [*Tagged.model_fields] == ["bits", "share", "later", "tag"]
    bad: list[dict[str, Any]] = [{}, {"bits": 3}, {"bits": 9}, {"bits": "5"}, {"bits": 5.0}, {"bits": True}]
    for given in (*bad, {"bits": 5, "share": 1.0}, {"bits": 5, "share": float("nan")}, {"bits": 5, "odd": 1}):
        with pytest.raises(ValidationError):
            Tagged(**given)
    with pytest.raises(ValidationError, match="bits is 3, which is not >= 4"):
        Tagged(bits=3)
    with pytest.raises(AttributeError, match="frozen"):
        tagged.bits = 6
    with pytest.raises(ValidationError):
        tagged.model_copy(update={"bits": 2})
