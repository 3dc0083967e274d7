"""The JSON Schema of a spec, for editors. The first line of each spec references the schema in `specs/schema.json`."""

import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema

from specc.compiler.spec.spec import Spec
from specc.compiler.strict import StrictModel

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TAGS = ("kind", "scheme", "metric")


class _ForEditors(GenerateJsonSchema):
    """Generates the schema with the descriptions of all fields, and without titles that only repeat a key.

    Each member of a union requires its tag. The default member, which describes sections without a tag, requires no
    tag.
    """

    def generate(self, schema: Any, mode: JsonSchemaMode = "validation") -> dict[str, Any]:
        return {"$schema": DIALECT, **_cleared(super().generate(schema, mode))}

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        model = schema["cls"]
        generated = super().model_schema(schema)
        generated["description"] = description_of(model)
        texts = field_descriptions(model)
        for key, field in generated.get("properties", {}).items():
            if key in _TAGS and "const" in field:
                field["description"] = f"The {key} of this section."
                if not model.untagged:
                    generated["required"] = sorted({*generated.get("required", ()), key})
            elif key in texts:
                field["description"] = texts[key]
        return generated


def description_of(model: type[StrictModel]) -> str:
    return inspect.cleandoc(model.__doc__ or "").partition("Attributes:\n")[0].rstrip()


def field_descriptions(model: type[StrictModel]) -> Mapping[str, str]:
    """Returns the description of each field, from the `Attributes:` sections of the model and its base classes."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        section = inspect.cleandoc(vars(base).get("__doc__") or "").partition("Attributes:\n")[2]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
            sentence = " ".join(text.split())
            texts[name] = sentence[0].upper() + sentence[1:]
    return texts


def schema_text() -> str:
    return json.dumps(Spec.model_json_schema(schema_generator=_ForEditors), indent=2, ensure_ascii=False) + "\n"


def _cleared(schema: Any, named: bool = False) -> Any:
    """Returns the schema without `title` and `discriminator` entries. If `named` is true, the keys of `schema` are
    names of fields, and a field `title` stays."""
    if isinstance(schema, list):
        return [_cleared(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    keywords = {key: value for key, value in schema.items() if named or key not in ("title", "discriminator")}
    return {key: _cleared(value, key in ("properties", "$defs") and not named) for key, value in keywords.items()}
