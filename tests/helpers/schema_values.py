"""Random values that a JSON Schema of specs allows, by the keywords that the schema uses."""

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

Schema = Mapping[str, Any]
WORDS = ("x", "mlp", "h1", "gelu(x)", "relu(x) ** 2", "blocks.*.mlp", "i >= j", "attention", "a b", "bytes", "0.5", "é")
NAMES = ("x", "up", "down", "act", "mlp", "q2", "a_b", "attention")
DEEPEST = 9  # levels below which only what is required is written
KNOWN = {
    "$ref", "additionalProperties", "anyOf", "const", "default", "description", "enum", "exclusiveMaximum",
    "exclusiveMinimum", "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems", "minLength",
    "minProperties", "minimum", "oneOf", "pattern", "patternProperties", "prefixItems", "properties", "propertyNames",
    "required", "type",
}  # fmt: skip


class SchemaValues:
    """Draws values that a schema allows."""

    def __init__(self, schema: Schema, rng: random.Random) -> None:
        self.schema, self.rng = schema, rng

    def value(self, schema: Schema | None = None, depth: int = 0) -> Any:
        """Returns a value of a part of the schema, by default of the whole.

        Raises:
            ValueError: the part has a keyword that no rule here reads.
        """
        schema = {key: value for key, value in self.schema.items() if key[0] != "$"} if schema is None else schema
        if unknown := schema.keys() - KNOWN:
            raise ValueError(f"the schema has keywords without a rule: {sorted(unknown)}")
        if "$ref" in schema:
            return self.value(self.schema["$defs"][schema["$ref"].rpartition("/")[2]], depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.rng.choice(schema["enum"])
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return self.value(self.rng.choice(schema[union]), depth)
        kinds: Mapping[str, Callable[[Schema, int], Any]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
            "boolean": lambda schema, depth: self.rng.random() < 0.5,
            "null": lambda schema, depth: None,
        }
        # what has no type may be anything
        return kinds[schema["type"]](schema, depth) if "type" in schema else self.rng.choice((None, 1, 0.5, "x", []))

    def _object(self, schema: Schema, depth: int) -> dict[str, Any]:
        fields, required = schema.get("properties", {}), schema.get("required", ())
        wanted = self.rng.random() * (depth < DEEPEST)
        chosen = [name for name in fields if name in required or self.rng.random() < 0.5 * wanted]
        value = {name: self.value(fields[name], depth + 1) for name in chosen}
        least = schema.get("minProperties", 0)
        others = dict(schema.get("patternProperties", {}))
        if isinstance(schema.get("additionalProperties"), Mapping):
            others[schema.get("propertyNames", {}).get("pattern", ".")] = schema["additionalProperties"]
        if others and not fields:
            for _ in range(least + (self.rng.randrange(3) if depth < DEEPEST else 0)):
                pattern, inner = self.rng.choice([*others.items()])
                value[self.rng.choice([name for name in NAMES if re.search(pattern, name)])] = self.value(
                    inner, depth + 1
                )
        most = schema.get("maxProperties")
        return dict([*value.items()][:most])

    def _array(self, schema: Schema, depth: int) -> list[Any]:
        least = schema.get("minItems", 0)
        count = self.rng.randint(least, max(least, min(schema.get("maxItems", least + 2), least + 2)))
        first = schema.get("prefixItems", [])
        return [self.value(first[i] if i < len(first) else schema["items"], depth + 1) for i in range(count)]

    def _string(self, schema: Schema, depth: int) -> str:
        pattern, least, most = schema.get("pattern", ""), schema.get("minLength", 0), schema.get("maxLength", 99)
        usual = [word for word in (*NAMES, *WORDS) if re.search(pattern, word) and least <= len(word) <= most]
        longest = "x" * most if re.search(pattern, "x" * most) else usual[0]
        return longest if self.rng.random() < 0.02 else self.rng.choice(usual)

    def _bounds(self, schema: Schema, step: float) -> tuple[float, float]:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -5) + step * ("exclusiveMinimum" in schema))
        high = schema.get("maximum", schema.get("exclusiveMaximum", low + 99) - step * ("exclusiveMaximum" in schema))
        return low, high

    def _integer(self, schema: Schema, depth: int) -> int:
        low, high = map(int, self._bounds(schema, 1))
        return self.rng.choice((low, high, self.rng.randint(low, min(high, low + 20)), self.rng.randint(low, high)))

    def _number(self, schema: Schema, depth: int) -> float:
        low, high = self._bounds(schema, 1e-6)
        return self.rng.choice((low, high, self.rng.uniform(low, min(high, low + 2)), self.rng.uniform(low, high)))
