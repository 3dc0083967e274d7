"""The JSON Schema of a spec, for editors.

It is saved in `specs/schema.json`, which each spec references in its first line.
"""

import json
from collections.abc import Iterator
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode

from specc.compiler.spec.spec import Spec
from specc.compiler.strict import StrictModel

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _ForEditors(GenerateJsonSchema):
    """Generates the schema without titles that only repeat a key.

    Each member of a union requires its tag, unless the member is the default of a section that does not state a tag.
    """

    def generate(self, schema: Any, mode: JsonSchemaMode = "validation") -> dict[str, Any]:
        found = super().generate(schema, mode)
        untagged = {model.__name__ for model in _all(StrictModel) if model.untagged}
        for key, member in _tags(found):
            name = member.rpartition("/")[2]
            model = found["$defs"][name]
            if name not in untagged:
                model["required"] = sorted({*model.get("required", ()), key})
        return {"$schema": DIALECT, **_cleared(found)}


def _all(model: type[StrictModel]) -> Iterator[type[StrictModel]]:
    for one in model.__subclasses__():
        yield one
        yield from _all(one)


def _tags(schema: Any) -> Iterator[tuple[str, str]]:
    """Yields the tag's key and the reference of each member, for every union."""
    if isinstance(schema, list):
        for item in schema:
            yield from _tags(item)
    elif isinstance(schema, dict):
        union = schema.get("discriminator")
        if isinstance(union, dict) and "mapping" in union:
            yield from ((union["propertyName"], member) for member in union["mapping"].values())
        for value in schema.values():
            yield from _tags(value)


def schema_text() -> str:
    """Returns the schema of `Spec` (draft 2020-12) as the text of a file. The text is deterministic."""
    return json.dumps(Spec.model_json_schema(schema_generator=_ForEditors), indent=2, ensure_ascii=False) + "\n"


def _cleared(schema: Any, named: bool = False) -> Any:
    """Returns the schema without `title` and `discriminator` entries.

    `named` is true if the keys are those of a spec, so that a key called `title` is not removed.
    """
    if isinstance(schema, list):
        return [_cleared(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if named or key not in ("title", "discriminator")}
    return {key: _cleared(value, key in ("properties", "$defs") and not named) for key, value in kept.items()}
