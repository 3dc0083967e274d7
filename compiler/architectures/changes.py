"""Changes to some of the blocks of a stack."""

import json
from collections.abc import Mapping
from functools import reduce
from typing import Annotated, Any

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer
from pydantic_core import InitErrorDetails

from specc.compiler.architectures.block import Block
from specc.compiler.blocks.wiring import Expressions, condition
from specc.compiler.expr.wiring import NUMBERS
from specc.compiler.strict import ExprText, LearnedName, Path, StrictModel

Data = Mapping[str, Any]


class Change(StrictModel):
    """Changes to fields of the blocks for which the condition `where` holds.

    A key may also be the name of a layer of the block. The value of such a key contains the changed fields of the
    layer. Mappings are merged field by field, in the order of the changes. A layer or norm of another `kind` replaces
    the existing layer or norm. Null removes a field, a learned value or a layer.

    Attributes:
        where: a condition such as `layer % 6 == 5`. `layer` is the index of a block, and `layers` is the number of
            blocks.
        norm: the changed fields of the norm.
        learn: added learned values, or changed fields of learned values.
        read: an expression for the residual stream at the start of the block.
        write: an expression for the residual stream at the end of the block.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any] | None] = Field(init=False)

    where: Annotated[ExprText, condition(*NUMBERS)]
    norm: dict[str, Any] | None = None
    learn: dict[LearnedName, dict[str, Any] | None] | None = None
    read: Expressions | None = None
    write: Expressions | None = None

    @model_serializer(mode="wrap")
    def _stated(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serializes only the fields that the change sets. Fields that the change sets to null are included, because
        null removes a field of the block."""
        stated = self.model_fields_set | (self.model_extra or {}).keys()
        return {key: value for key, value in dump(self).items() if key in stated}

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that the change sets, by name, as JSON data."""
        return {name: value for name, value in self.stated().items() if name != "where"}


def changed_block(base: Block, changes: Mapping[int, Change]) -> Block:
    """Returns `base` with the changes applied. `changes` maps the index of each change to the change.

    Raises:
        ValidationError: If the changed block is invalid. The path of an error points into the change that causes the
            error.
    """
    data: Data = {name: value for name, value in base.stated().items() if name in Block.model_fields}
    merged = reduce(_merge_block, [change.fields for change in changes.values()], data)
    try:
        return Block.model_validate_json(json.dumps(merged))
    except ValidationError as error:
        details = [
            InitErrorDetails(
                type=problem["type"],
                loc=source_of(problem["loc"], base, changes),
                input=problem["input"],
                ctx=problem.get("ctx", {}),
            )
            for problem in error.errors(include_url=False)
        ]
        raise ValidationError.from_exception_data("Blocks", details) from None


def source_of(path: Path, base: Block, changes: Mapping[int, Change]) -> Path:
    """Returns the spec path of the field `path` of a changed block. `base` is the block before the changes. If several
    changes set the field, the path points into the last of these changes. If no change sets the field, the path points
    into the fields of all blocks."""
    rest: Path = path
    stated: frozenset[str] = frozenset()  # the fields of the layer before the changes
    nearest: Path | None = None  # the last change of the layer
    fields_of = {i: change.fields for i, change in changes.items()}
    if path[:1] == ("layers",) and len(path) > 1:
        index = path[1]
        assert isinstance(index, int)
        removed = {key for fields in fields_of.values() for key, value in fields.items() if value is None}
        layer = [layer for layer in base.layers if layer.title not in removed][index]
        stated = frozenset(layer.model_fields_set)
        rest = tuple(part for i, part in enumerate(path[2:]) if i or part != getattr(layer, "kind", ""))
        rest = (layer.title, *rest)
    elif path[:1] == ("norm",) and len(path) > 2:  # the kind is part of the path of a validation error
        rest = ("norm", *path[2:])
    for i, fields in reversed(fields_of.items()):
        inner: Any = fields
        # the first element is a key of the block or the name of a layer; the data may lack the last element
        for part in rest[: max(1, len(rest) - 1)]:
            inner = inner.get(part) if isinstance(inner, dict) else None
        if inner is None:
            continue
        # a change of the kind replaces all fields
        if len(rest) != 2 or not isinstance(inner, dict) or rest[1] in inner or "kind" in inner:
            return ("changes", i, *rest)
        nearest = nearest or ("changes", i, *rest)
    return path if nearest is None or rest[-1] in stated else nearest


def _merge_block(base: Data, fields: Data) -> Data:
    merged = dict(base)
    for key, value in fields.items():
        if key in Block.model_fields:
            merged[key] = _merge(merged.get(key), value)
    layers = []
    for layer in base["layers"]:
        title = layer.get("name") or layer["kind"]
        change = fields.get(title, {}) if title not in Block.model_fields else {}
        if change is not None:
            layers.append(_merge(layer, {"name": title, **change} if _replaces(layer, change) else change))
    return {**merged, "layers": layers}


def _merge(base: Any, value: Any) -> Any:
    if not isinstance(base, Mapping) or not isinstance(value, Mapping) or _replaces(base, value):
        return value
    merged = {**base, **{key: _merge(base.get(key), inner) for key, inner in value.items()}}
    return {key: inner for key, inner in merged.items() if inner is not None}


def _replaces(base: Data, value: Any) -> bool:
    return isinstance(value, Mapping) and "kind" in value and value["kind"] != base.get("kind", value["kind"])
