"""Errors and findings for machines: JSON with its schema, GitHub annotations, and SARIF 2.1.0."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specc.compiler.errors import Diagnostic, Mark, safe
from specc.compiler.errors.codes import CODES

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def json_text(diagnostics: Sequence[Diagnostic]) -> str:
    """Returns a JSON list of the diagnostics. `schema` returns the JSON Schema of this list."""
    return json.dumps([_fields(diagnostic) for diagnostic in diagnostics], indent=2)


def github_text(diagnostics: Sequence[Diagnostic]) -> str:
    """Returns one GitHub Actions annotation per diagnostic, each on its own line."""
    return "\n".join(map(_annotation, diagnostics))


def sarif_text(diagnostics: Sequence[Diagnostic]) -> str:
    """Returns a SARIF 2.1.0 log of one run. The rules of the run are the codes of the diagnostics."""
    codes = sorted({diagnostic.code for diagnostic in diagnostics})
    rules = [{"id": code, "shortDescription": {"text": CODES[code]}} for code in codes]
    run = {
        "tool": {"driver": {"name": "specc", "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "results": [_result(diagnostic, codes.index(diagnostic.code)) for diagnostic in diagnostics],
    }
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


FORMATS: Mapping[str, Callable[[Sequence[Diagnostic]], str]] = {
    "json": json_text,
    "github": github_text,
    "sarif": sarif_text,
}


def schema() -> dict[str, Any]:
    text, number = {"type": "string"}, {"type": "integer", "minimum": 1}

    def record(description: str, **fields: Any) -> dict[str, Any]:
        closed = {"type": "object", "required": [*fields], "additionalProperties": False}
        return {"description": description, **closed, "properties": fields}

    note = record(
        "A further position in the file.",
        message={**text, "description": "A note about the position."},
        line={**number, "description": "The line, from 1."},
        column={**number, "description": "The character in the line, from 1."},
    )
    finding = record(
        "One error or finding.",
        code={"enum": [*CODES], "description": "The code; `specc explain CODE` explains it."},
        message={**text, "minLength": 1, "description": "The problem."},
        hint={**text, "description": "How to fix it; empty if that is obvious."},
        file={**text, "description": "The file at fault; empty if there is none."},
        line={**number, "description": "The line of the file, from 1; 1 if there is no file."},
        column={**number, "description": "The character in the line, from 1; 1 if there is no file."},
        related={"type": "array", "items": note, "description": "Further positions in the file."},
    )
    title = "Errors and findings of specc"
    description = "The output of a command of specc with --format json: its errors and findings, or an empty list."
    return {"$schema": DIALECT, "title": title, "description": description, "type": "array", "items": finding}


def schema_text() -> str:
    return json.dumps(schema(), indent=2) + "\n"


def _fields(diagnostic: Diagnostic) -> dict[str, object]:
    place = {"file": diagnostic.file, "line": diagnostic.mark.line, "column": diagnostic.mark.column}
    related = [{"message": note, "line": at.line, "column": at.column} for note, at in diagnostic.related]
    words = {"code": diagnostic.code, "message": diagnostic.message, "hint": diagnostic.hint}
    return {**words, **place, "related": related}


def _annotation(diagnostic: Diagnostic) -> str:
    mark = diagnostic.mark
    place = f"file={_property(diagnostic.file)},line={mark.line},col={mark.column}," if diagnostic.file else ""
    return f"::error {place}title={diagnostic.code}::{_data(_body(diagnostic))}"


def _body(diagnostic: Diagnostic) -> str:
    return "\n".join(safe(text) for text in (diagnostic.message, diagnostic.hint) if text)


def _result(diagnostic: Diagnostic, rule: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": diagnostic.code,
        "ruleIndex": rule,
        "level": "error",
        "message": {"text": _body(diagnostic)},
    }
    if diagnostic.file:
        result["locations"] = [{"physicalLocation": _location(diagnostic.file, diagnostic.mark)}]
        result["relatedLocations"] = [
            {"physicalLocation": _location(diagnostic.file, at), "message": {"text": note or "see also"}}
            for note, at in diagnostic.related
        ]
    return result


def _location(file: str, mark: Mark) -> dict[str, Any]:
    from urllib.parse import quote

    # a relative path with slashes is a relative URI reference; only an absolute path needs a scheme
    uri = f"file://{quote(file)}" if file.startswith("/") else quote(file)
    return {"artifactLocation": {"uri": uri}, "region": {"startLine": mark.line, "startColumn": mark.column}}


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
