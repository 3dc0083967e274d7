"""Spec text -> data and marks; hostile text is refused with a place."""

import gc
import math
import resource
import time
from pathlib import Path

import pytest

from specc.compiler.errors import Diagnostic, Mark, SpecError
from specc.compiler.text.source import MAX_BYTES, MAX_LINE, read
from specc.compiler.text.yaml import MAX_DEPTH, MAX_FINDINGS, MAX_NODES


def refused(text: str | bytes, tmp_path: Path) -> tuple[Diagnostic, ...]:
    file = tmp_path / "bad.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SpecError) as caught:
        read(file)
    return caught.value.diagnostics


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("yes", "yes"),
        ("off", "off"),
        ("1e-3", 0.001),
        ("1E5", 1e5),
        (".5", 0.5),
        ("1.", 1.0),
        ("-0", 0),
        ("+3", 3),
        ("0o17", 15),
        ("0x1f", 31),
        ("0123", 123),
        ("0b1", "0b1"),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2020-01-01", "2020-01-01"),
        ("true", True),
        ("False", False),
        ("tRue", "tRue"),
        ("~", None),
        ("Null", None),
        ("''", ""),
        ("'1'", "1"),
        ('"\\u00e9\\n"', "é\n"),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("1/sqrt(layer + 1)", "1/sqrt(layer + 1)"),
        ("leaky_relu(x, 0.5) ** 2", "leaky_relu(x, 0.5) ** 2"),
        ("[1, [a, {b: 2}]]", (1, ("a", {"b": 2}))),
        ("{a: , b: []}", {"a": None, "b": ()}),
    ],
)
def test_values_follow_the_core_schema_of_yaml_1_2(text: str, value: object) -> None:
    got = read(f"key: {text}\n").data
    assert got == {"key": value}
    assert type(got["key"]) is type(value)  # type: ignore[index]


def test_nan_is_a_number() -> None:
    data = read("key: .nan").data
    assert isinstance(data, dict) and math.isnan(data["key"])


def test_marks_of_keys_and_values() -> None:
    source = read("a: 1\nbig:\n  - {x: one, y: }\n  - two\n\"q\": 'it''s'\n")
    assert source.keys[("big",)] == Mark(2, 1)
    assert source.values[("big",)] == Mark(3, 3)
    assert source.values[("big", 0)] == Mark(3, 5)
    assert source.keys[("big", 0, "y")] == Mark(3, 14)
    assert source.values[("big", 0, "y")] == Mark(3, 14), "a value left out is shown at its key"
    assert source.values[("big", 1)] == Mark(4, 5)
    assert source.value(("q",)).mark == Mark(5, 6)
    assert source.key(("big", 0)).mark == Mark(3, 5), "an item has no key"
    assert source.value(("big", 1, "none", "such")).mark == Mark(4, 5), "the nearest value around it"
    assert source.place(("big",)).mark == Mark(2, 1), "what spans lines is shown at its key"
    assert source.place(("a",)).mark == Mark(1, 4)


@pytest.mark.parametrize(
    ("text", "offset", "column"),
    [
        ("k: abc + d", 6, 10),
        ("k: 'abc + d'", 6, 11),
        ('k: "abc + d"', 6, 11),
        ("k: 'a''c + d'", 6, 12),
        ('k: "a\\u0041c + d"', 6, 16),
        ("k: abc", 99, 6),
        ("k: abc\n  def", 2, 6),
    ],
)
def test_a_place_inside_a_text(text: str, offset: int, column: int) -> None:
    assert read(text).inside(("k",), offset).mark == Mark(1, column)


@pytest.mark.parametrize(
    "text", ["k: abc\n  + de", "k: 'abc\n  + de'", 'k: "abc \n  + de"', "k:\n  abc\n  + de", "k: abc\n\n  + de"]
)
def test_a_place_inside_a_text_over_lines(text: str) -> None:
    source = read(text)
    assert isinstance(source.data, dict)
    lines = text.split("\n")
    at = source.data["k"].index("d")
    assert source.inside(("k",), at).mark == Mark(len(lines), lines[-1].index("d") + 1)
    assert source.inside(("k",), 99).mark == Mark(len(lines), lines[-1].index("e") + 1)


def test_a_place_inside_a_block_scalar_is_its_start() -> None:
    assert read("k: >\n  abc\n  + de").inside(("k",), 5).mark == Mark(1, 4)


def test_windows_line_ends() -> None:
    source = read("a: 1\r\nb:\r\n  c: 2\r\n")
    assert source.data == {"a": 1, "b": {"c": 2}}
    assert source.values[("b", "c")] == Mark(3, 6)


def test_a_missing_file_suggests_a_near_one(tmp_path: Path) -> None:
    (tmp_path / "golf.yaml").write_text("a: 1\n")
    with pytest.raises(SpecError) as caught:
        read(tmp_path / "gofl.yaml")
    (problem,) = caught.value.diagnostics
    assert (problem.code, problem.message) == ("S001", "the file does not exist")
    assert "golf.yaml" in problem.hint


def test_a_directory_and_a_file_name_that_cannot_be(tmp_path: Path) -> None:
    for path, message in ((tmp_path, "this is a directory"), (Path("a\0b"), "the file cannot be read")):
        with pytest.raises(SpecError) as caught:
            read(path)
        assert caught.value.diagnostics[0].code == "S001"
        assert caught.value.diagnostics[0].message.startswith(message)


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "~\n"])
def test_an_empty_file(text: str, tmp_path: Path) -> None:
    assert [problem.code for problem in refused(text, tmp_path)] == ["S002"]


LIMIT = 0.2  # seconds; a quiet core of 2026 needs at most 0.05

BOMBS: dict[str, tuple[str | bytes, str, int]] = {
    "aliases": ("a: &a [x]\nb: [*a, *a]\n", "S009", 1),
    "laughs": ("".join(f"k{i}: &a{i} [{f'*a{i - 1},' * 9}]\n" for i in range(1, 9)), "S009", 1),
    "anchors": ("".join(f"- &a{i} x\n" for i in range(9999)), "S009", 1),
    "merge key": ("a:\n  <<: {b: 1}\n", "S009", 2),
    "deep list": ("[" * 100_000, "S003", 1),
    "deep list over lines": ("[\n" * 50_000, "S003", MAX_DEPTH + 1),
    "deep mapping": ("{a: " * 2000, "S003", 1),
    "deep blocks": ("\n".join(" " * i + "a:" for i in range(500)), "S003", MAX_DEPTH + 1),
    "deep items": ("- " * 4000 + "a", "S003", 1),
    "deep keys": ("? " * 4000 + "a", "S012", 1),
    "2 MiB": ("a" * (2 << 20), "S003", 1),
    "many items": ("- a\n" * 250_000, "S003", 1),
    "many flow items": (("- [" + "a," * 4000 + "]\n") * 60, "S003", 1),
    "long line": ("a: " + "x" * MAX_LINE, "S003", 1),
    "huge integer": ("a: " + "9" * 1_000_000, "S003", 1),
    "big integer": ("a:\n  b: " + "9" * 5000, "S013", 2),
    "NUL": ("a: 1\nb: \0\n", "S005", 2),
    "escape sequence": ("a: 1\n\nb: \x1b[31m\n", "S005", 3),
    "reordering": ("a: x\u202ey\n", "S005", 1),
    "line separator": ("a: 1\nb: x\u2028c: 2\n", "S005", 2),
    "byte-order mark": (b"\xef\xbb\xbfa: 1\n", "S004", 1),
    "UTF-16": ("a: 1\n".encode("utf-16"), "S004", 1),
    "Latin-1": (b"a: 1\nb: \xe9\n", "S004", 2),
    "tab": ("a:\n\tb: 1\n", "S006", 2),
    "object tag": ("a: !!python/object/apply:os.system ['true']\n", "S010", 1),
    "custom tag": ("a: 1\nb: !x 2\n", "S010", 2),
    "directive": ("%YAML 1.1\n---\na: no\n", "S010", 2),
    "two documents": ("a: 1\n---\nb: 2\n", "S011", 2),
    "list as key": ("a: 1\n[b]: 2\n", "S012", 2),
    "number as key": ("a: 1\n1: 2\n", "S012", 2),
    "null as key": ("a: 1\n: 2\n", "S012", 2),
    "escape beyond Unicode": ('a: 1\nb: "\\UFFFFFFFF"\n', "S007", 2),
    "half a character": ('a: 1\nb: "\\ud800"\n', "S007", 2),
    "unclosed list": ("a: [1,\n  2\nb: 3\n", "S007", 1),
    "unclosed quote": ('a: 1\nb: "x\nc: 1\n', "S007", 2),
    "indentation": ("a:\n    b: 1\n  c: 2\n", "S007", 3),
    "colon": ("a: b: c\n", "S007", 1),
}


@pytest.mark.parametrize("name", BOMBS)
def test_hostile_text_is_refused_where_it_is(name: str, tmp_path: Path) -> None:
    text, code, line = BOMBS[name]
    first = refused(text, tmp_path)[0]
    assert (first.code, first.mark.line) == (code, line)
    assert first.file == str(tmp_path / "bad.yaml") and first.message and first.hint


def test_hostile_text_is_cheap(tmp_path: Path) -> None:
    """Each is refused within LIMIT seconds of CPU time, the best of ten, and all of them add at most 64 MiB."""
    assert len(BOMBS) >= 25
    gc.collect()
    gc.freeze()  # what earlier tests of this process left is not the reader's to walk through
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slow = {}
    for name, (text, _, _) in BOMBS.items():
        times = []
        while len(times) < 10 and min(times, default=1.0) >= LIMIT:
            begin = time.process_time()
            refused(text, tmp_path)
            times.append(time.process_time() - begin)
        if min(times) >= LIMIT:
            slow[name] = min(times)
    assert slow == {}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_the_limits_themselves_are_allowed(tmp_path: Path) -> None:
    assert read("[" * (MAX_DEPTH - 1) + "x" + "]" * (MAX_DEPTH - 1)).data is not None
    assert read("a: " + "x" * (MAX_LINE - 3)).data is not None
    file = tmp_path / "long.yaml"
    file.write_text(("#" * 999 + "\n") * (MAX_BYTES // 1000) + "a: 1\n")
    assert read(file).data == {"a": 1}


def test_too_many_values_that_no_search_foresees() -> None:
    row = "{a, b, c, d}"
    text = ("- " + " : ".join([row] * 1) + "\n") * (MAX_NODES // 5)
    with pytest.raises(SpecError) as caught:
        read(text)
    assert caught.value.diagnostics[0].code == "S003"


def test_duplicate_keys_name_both_lines_and_all_are_found() -> None:
    with pytest.raises(SpecError) as caught:
        read("a: 1\nb: {c: 1, c: 2}\na: 3\na: 4\n")
    results = [(problem.code, problem.mark, problem.related[0][1]) for problem in caught.value.diagnostics]
    assert results == [
        ("S008", Mark(2, 11), Mark(2, 5)),
        ("S008", Mark(3, 1), Mark(1, 1)),
        ("S008", Mark(4, 1), Mark(1, 1)),
    ]


def test_a_flood_of_findings_is_cut() -> None:
    with pytest.raises(SpecError) as caught:
        read("".join(f"- &a{i} x\n" for i in range(5000)))
    assert len(caught.value.diagnostics) == MAX_FINDINGS


def test_text_with_lone_surrogates_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        read("a: \ud800\n")
    assert caught.value.diagnostics[0].code == "S005"
