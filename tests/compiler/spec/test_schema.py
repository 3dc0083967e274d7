"""The JSON Schema: committed, valid, and of one mind with the compiler."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from schema_values import SchemaValues
from tiers import Trials, tiers

from specc.compiler.errors import SpecError
from specc.compiler.errors.codes import CODES
from specc.compiler.spec.check import check
from specc.compiler.spec.json_schema import DIALECT, schema_text
from specc.compiler.text.source import Source, read

SPECS = Path(__file__).parents[3] / "specs"
SCHEMA = json.loads(schema_text())


def test_the_committed_schema_is_current() -> None:
    assert (SPECS / "schema.json").read_text() == schema_text(), "run `specc schema --write`"


def test_it_is_valid_and_its_own_dialect() -> None:
    assert SCHEMA["$schema"] == DIALECT
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_every_object_is_closed_and_described_with_its_fields() -> None:
    for name, model in {"Spec": SCHEMA, **SCHEMA["$defs"]}.items():
        # the further keys of a change are the names of layers, which null removes
        layer = {"anyOf": [{"additionalProperties": True, "type": "object"}, {"type": "null"}]}
        assert model["additionalProperties"] == (layer if name == "Change" else False), name
        assert model["description"] and "Attributes:" not in model["description"], name
        assert [key for key, field in model["properties"].items() if not field.get("description")] == [], name


def listed(data: Any) -> Any:
    """Tuples as the lists that JSON has."""
    if isinstance(data, dict):
        return {key: listed(value) for key, value in data.items()}
    return [listed(item) for item in data] if isinstance(data, tuple) else data


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_specs_pass(path: Path) -> None:
    jsonschema.validate(listed(read(path).data), SCHEMA, jsonschema.Draft202012Validator)


VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    3,
    2**40,
    0.5,
    1.5,
    -0.25,
    "x",
    "",
    "none",
    "adamw",
    [],
    {},
    ["x"],
    [1, 2],
)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path] * bool(path) + [result for key, value in inner for result in places(value, (*path, key))]


def mutated(data: Any, rng: random.Random) -> Any:
    """One value replaced, removed, or a key added."""
    data = copy.deepcopy(data)
    path = rng.choice(places(data))
    holder = data
    for part in path[:-1]:
        holder = holder[part]
    change = rng.randrange(4)
    if change == 0 or not isinstance(holder, dict):
        holder[path[-1]] = copy.deepcopy(rng.choice(VALUES))
    elif change == 1:
        del holder[path[-1]]
    elif change == 2:
        holder[f"{path[-1]}x"] = holder.pop(path[-1])
    else:
        holder[rng.choice(("kind", "scheme", "bits", "dim", "steps", "title"))] = copy.deepcopy(rng.choice(VALUES))
    return data


def at(data: Any, path: tuple[Any, ...]) -> Any:
    return at(data[path[0]], path[1:]) if path else data


def exchanged(data: Any, other: Any, rng: random.Random) -> Any:
    """One value replaced by that of another spec at the same place."""
    data, others = copy.deepcopy(data), set(places(other))
    path = rng.choice([path for path in places(data) if path in others])
    at(data, path[:-1])[path[-1]] = at(other, path)
    return data


def unlisted(data: Any) -> Any:
    """Lists as the tuples that a source holds."""
    if isinstance(data, dict):
        return {key: unlisted(value) for key, value in data.items()}
    return tuple(unlisted(item) for item in data) if isinstance(data, list) else data


def codes(data: Any) -> set[str]:
    """Of a source without places: to read its text would take ten times as long as to check it."""
    try:
        check(Source("<text>", "", unlisted(data), {}, {}, {}))
    except SpecError as error:
        return {problem.code for problem in error.diagnostics}
    return set()


BEYOND = {code for code in CODES if code.startswith("S2")} | {"S106", "S107"}
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def agreed(data: Any) -> bool:
    """Returns the verdict of the editor, and asserts that the compiler has the same.

    They may differ in rules across fields (S2..) and inside texts (S106, S107).

    And in `8.0` for a whole number, which JSON Schema takes; no case here writes that. And inside changes, whose fields
    of layers a schema does not see.
    """
    result, accepted = codes(data), VALIDATOR.is_valid(data)
    assert accepted == (result <= BEYOND), (result, data)
    return accepted


@tiers("C4", changed_specs=(600, 5_000))
def test_editor_and_compiler_agree(trials: Trials) -> None:
    rng = random.Random(20)
    bases = [listed(read(path).data) for path in sorted(SPECS.glob("*.yaml"))]
    for base in bases:
        base["model"].get("blocks", {}).pop("changes", None)
    verdicts = [0, 0]
    for number in range(trials["changed_specs"]):
        verdicts[agreed(mutated(bases[number % len(bases)], rng))] += 1
    assert min(verdicts) > 20


@tiers("C4", generated_specs=(200, 5_000))
def test_editor_and_compiler_agree_on_generated_specs(trials: Trials) -> None:
    """Each is valid by the schema; then one value of it is changed. Of these, most changes to any value are errors, and
    most exchanges with the spec before are none."""
    rng = random.Random(4)
    values = SchemaValues(SCHEMA, rng)
    verdicts, before = [0, 0], None
    for number in range(trials["generated_specs"]):
        data = values.value()
        if isinstance(data["model"].get("blocks"), dict):
            data["model"]["blocks"].pop("changes", None)
        assert agreed(data), data
        verdicts[agreed(exchanged(data, before, rng) if before and number % 2 else mutated(data, rng))] += 1
        before = data
    assert min(verdicts) > trials["generated_specs"] // 5, verdicts
