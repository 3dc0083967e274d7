"""How errors look: as text with snippets, as JSON, as GitHub annotations."""

import json
import re

from specc.compiler.errors import Diagnostic, Mark, SpeccError, SpecError, render
from specc.compiler.errors.formats import github_text, json_text

TWO = SpecError(
    [
        Diagnostic(
            "S211",
            "kv_heads 3 does not divide heads 4",
            "choose 1, 2 or 4",
            "a.yaml",
            Mark(2, 13),
            (("of these", Mark(1, 8)),),
        ),
        Diagnostic("S101", "100% wrong:\x1b[31m\nred, \u202e", "", "z,b:c.yaml", Mark(9, 1)),
    ],
    {"a.yaml": "heads: 4\n  kv_heads: 3 # \x1b[31m\n"},
)


def test_text_form() -> None:
    assert render(TWO) == (
        "a.yaml:2:13: S211 kv_heads 3 does not divide heads 4\n"
        "  |\n"
        "2 |   kv_heads: 3 # �[31m\n"
        "  |             ^\n"
        "  |\n"
        "1 | heads: 4\n"
        "  |        ^ of these\n"
        "  = help: choose 1, 2 or 4\n"
        "\n"
        "z,b:c.yaml:9:1: S101 100% wrong:\\x1b[31m\\x0ared, \\u202e\n"
        "\n"
        "2 errors"
    )


def test_color_only_colors() -> None:
    plain = render(TWO)
    colored = render(TWO, color=True)
    assert colored != plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain


def test_json_form() -> None:
    first, second = json.loads(json_text(TWO.diagnostics))
    assert first == {
        "code": "S211",
        "message": "kv_heads 3 does not divide heads 4",
        "hint": "choose 1, 2 or 4",
        "file": "a.yaml",
        "line": 2,
        "column": 13,
        "related": [{"message": "of these", "line": 1, "column": 8}],
    }
    assert (second["line"], second["related"]) == (9, [])


def test_github_form() -> None:
    first, second = github_text(TWO.diagnostics).split("\n")
    where = "file=a.yaml,line=2,col=13,title=S211"
    assert first == f"::error {where}::kv_heads 3 does not divide heads 4%0Achoose 1, 2 or 4"
    assert second.startswith("::error file=z%2Cb%3Ac.yaml,line=9,col=1,title=S101::100%25 wrong:")


def test_long_lines_wide_letters_and_errors_without_a_place() -> None:
    line = f"{'名' * 40}: {'y' * 400} HERE {'z' * 400}"
    error = SpecError([Diagnostic("S101", "m", "h", "f", Mark(1, line.index("HERE") + 1))], {"f": line})
    _, _, shown, caret, _ = render(error).split("\n")
    assert len(shown) < 120
    assert caret.index("^") == shown.index("HERE") and caret.count("^") == 4
    error = SpecError([Diagnostic("S101", "m", "h", "f", Mark(1, 3))], {"f": "名名key"})
    assert "  |     ^^^" in render(error), "a wide letter takes two columns"
    assert render(SpeccError("no nvcc", "install CUDA")) == "error: U002 no nvcc\n  = help: install CUDA"
