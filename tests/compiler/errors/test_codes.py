"""Every error and finding has a code, every code is given somewhere, and its letter states the exit code."""

import ast
import importlib
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import specc.cli
import specc.compiler
import specc.runtime
from specc.compiler.errors import Bug, Diagnostic, Ended, Mark, SpeccError, SpecError, UsageProblem
from specc.compiler.errors.codes import CODES, EXIT_CODES, exit_code_of
from specc.compiler.errors.formats import DIALECT, json_text, sarif_text, schema
from specc.compiler.report.error_pages import page_of
from specc.runtime.errors import RuntimeFailure

ROOT = Path(__file__).parents[3]
LITERAL = re.compile(r"[BEFGIPRSU]\d{3}")  # letters of codes
OTHERS = {"B200"}  # a GPU


def modules() -> Iterator[Any]:
    for half in (specc.compiler, specc.runtime):
        for module in pkgutil.walk_packages(half.__path__, f"{half.__name__}."):
            if not module.name.startswith("specc.runtime.submission."):  # parts of train_gpt.py, with no errors of ours
                yield importlib.import_module(module.name)


def subclasses(kind: type) -> Iterator[type]:
    for inner in kind.__subclasses__():
        yield inner
        yield from subclasses(inner)


def literals() -> set[str]:
    """Texts in the form of a code, in all modules but the table."""
    found = set()
    for half in ("compiler", "runtime", "cli"):
        for path in (ROOT / half).rglob("*.py"):
            if path.name != "codes.py":
                constants = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
                found |= {str(node.value) for node in constants if LITERAL.fullmatch(str(node.value))}
    return found


def test_all_codes_are_given_and_no_others() -> None:
    assert literals() - OTHERS == set(CODES)


def test_every_error_has_a_code_of_its_exit_code() -> None:
    list(modules())
    kinds = [*subclasses(SpeccError), *subclasses(RuntimeFailure), SpeccError, RuntimeFailure]
    assert len(kinds) > 25
    for kind in kinds:
        name = kind.__name__
        if not kind.__module__.startswith("specc.") or kind is SpecError or name == "PeerLost":
            continue  # SpecError has the code of its first problem; PeerLost is never shown
        assert exit_code_of(kind.code) == kind.exit_code, name  # type: ignore[attr-defined]
    assert exit_code_of(Bug.code) == 70 and exit_code_of(Ended("P002", "m").code) == 130


def test_every_letter_is_used() -> None:
    assert {code[0] for code in CODES} == set(EXIT_CODES)


def test_a_page_of_a_change_shows_both_sides() -> None:
    page = page_of("S210")
    assert page.exit_code == 2 and "S210" in page.message
    assert page.bad != page.good and set(page.bad.splitlines()) - set(page.good.splitlines())
    assert "bad:" in page.text() and "good:" in page.text() and "- " not in page.bad.splitlines()[0][:1]


def test_a_page_of_commands_shows_both() -> None:
    page = page_of("F005")
    assert "--budget 1000 " in page.bad and "--budget 1000000" in page.good and page.exit_code == 1


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_a_page(code: str) -> None:
    page = page_of(code)
    assert page.meaning == CODES[code] and page.text().startswith(f"{code}: ")


def test_an_unknown_code() -> None:
    with pytest.raises(UsageProblem, match="there is no code S999"):
        page_of("S999")


DIAGNOSTICS = (
    Diagnostic("S211", "3 does not\ndivide 4", "choose 1", "a b/ä.yaml", Mark(2, 13), (("of these", Mark(1, 8)),)),
    Diagnostic("R001", "the loss is NaN", ""),
    Diagnostic("S211", "twice", "h", "/tmp/x.yaml", Mark(9, 1)),
)


def test_the_schema_of_findings_is_valid_committed_and_kept() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema()["$schema"] == DIALECT
    committed = (ROOT / "docs/reference/findings.schema.json").read_text()
    assert json.loads(committed) == schema(), "run python docs/generate.py --write"
    for diagnostics in ((), DIAGNOSTICS):
        jsonschema.validate(json.loads(json_text(diagnostics)), schema(), jsonschema.Draft202012Validator)


@pytest.mark.parametrize(("key", "value"), [("code", "S999"), ("line", 0), ("message", ""), ("more", 1)])
def test_the_schema_of_findings_refuses(key: str, value: object) -> None:
    data = json.loads(json_text(DIAGNOSTICS))
    data[0][key] = value
    assert not jsonschema.Draft202012Validator(schema()).is_valid(data)


# The parts of the SARIF 2.1.0 schema (OASIS) that a log of specc can have, with its required keys and closed objects.
REGION = {"type": "object", "additionalProperties": False, "required": ["startLine"], "properties": {
    "startLine": {"type": "integer", "minimum": 1}, "startColumn": {"type": "integer", "minimum": 1}}}  # fmt: skip
MESSAGE = {"type": "object", "required": ["text"], "additionalProperties": False,
           "properties": {"text": {"type": "string", "minLength": 1}}}  # fmt: skip
LOCATION = {"type": "object", "additionalProperties": False, "properties": {"message": MESSAGE, "physicalLocation": {
    "type": "object", "additionalProperties": False, "required": ["artifactLocation"], "properties": {
        "region": REGION, "artifactLocation": {"type": "object", "additionalProperties": False, "properties": {
            "uri": {"type": "string", "pattern": r"^(file:///)?[A-Za-z0-9._~/%+-]+$"}}}}}}}  # fmt: skip
SARIF = {"type": "object", "required": ["version", "runs"], "additionalProperties": False, "properties": {
    "$schema": {"type": "string", "format": "uri"}, "version": {"const": "2.1.0"},
    "runs": {"type": "array", "items": {"type": "object", "required": ["tool"], "additionalProperties": False,
        "properties": {
            "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
            "tool": {"type": "object", "required": ["driver"], "additionalProperties": False, "properties": {
                "driver": {"type": "object", "required": ["name"], "additionalProperties": False, "properties": {
                    "name": {"type": "string"},
                    "rules": {"type": "array", "uniqueItems": True, "items": {"type": "object", "required": ["id"],
                        "additionalProperties": False,
                        "properties": {"id": {"type": "string"}, "shortDescription": MESSAGE}}}}}}},
            "results": {"type": "array", "items": {"type": "object", "required": ["message"],
                "additionalProperties": False, "properties": {
                    "ruleId": {"type": "string"}, "ruleIndex": {"type": "integer", "minimum": 0},
                    "level": {"enum": ["none", "note", "warning", "error"]}, "message": MESSAGE,
                    "locations": {"type": "array", "items": LOCATION},
                    "relatedLocations": {"type": "array", "items": LOCATION, "uniqueItems": True}}}}}}}}}  # fmt: skip


def test_sarif_is_valid_and_says_the_same() -> None:
    for diagnostics in ((), DIAGNOSTICS):
        log = json.loads(sarif_text(diagnostics))
        jsonschema.validate(log, SARIF, jsonschema.Draft7Validator)
        (run,) = log["runs"]
        assert len(run["results"]) == len(diagnostics)
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert rules == ["R001", "S211"]
    assert [rules[result["ruleIndex"]] for result in run["results"]] == ["S211", "R001", "S211"]
    first, second, third = run["results"]
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "a%20b/%C3%A4.yaml"
    assert place["region"] == {"startLine": 2, "startColumn": 13}
    assert first["relatedLocations"][0]["message"]["text"] == "of these"
    assert "locations" not in second and second["message"]["text"] == "the loss is NaN"
    assert third["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "file:///tmp/x.yaml"
