"""Small versions of large specs for `verify`, with the same kinds of blocks."""

import json
from collections.abc import Iterator
from typing import Any

from specc.compiler.architectures.decoder import Decoder
from specc.compiler.build import canonical
from specc.compiler.errors import SpecError
from specc.compiler.pipeline import lower
from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec

LARGE = 200_000_000  # a spec with more parameters than this number is reduced
IDS = 1024  # the vocabulary of a reduced spec


def reduced(spec: Spec) -> Spec | None:
    """Returns a small spec with the same kinds of blocks as a large spec; None if `spec` is not large.

    The vocabulary of the small spec has at most 1,024 ids. The small spec has one layer per distinct block, but at
    least two layers. It has all layers of `spec` if the spec states the order of blocks, or if expressions refer to
    other layers.
    """
    model = spec.model
    if not isinstance(model, Decoder) or parameters_of(spec) <= LARGE:
        return None
    first = {block: layer for layer, block in reversed(list(enumerate(model.blocks.every)))}
    layers = sorted(first.values())
    if len(layers) == 1:
        layers += [layer for layer in range(model.blocks.count) if layer != layers[0]][:1]
    for chosen in (layers, list(range(model.blocks.count))):
        try:
            return load(json.dumps(_with(spec, model, chosen)))[0]
        except SpecError as error:
            refused = error
    raise refused


def parameters_of(spec: Spec) -> int:
    return sum(param.count for param in lower(spec, spec.targets[0]).params)


def _with(spec: Spec, model: Decoder, layers: list[int]) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(canonical(spec))
    shape, blocks = data["model"], data["model"]["blocks"]
    shape["vocab"] = min(shape["vocab"], IDS)
    for part in _mappings(data):
        for key in ("bos", "buckets"):
            if isinstance(part.get(key), int):
                part[key] = min(part[key], IDS - (key == "bos"))
    if len(layers) == model.blocks.count:
        return data
    blocks["count"] = len(layers)
    holding = [model.blocks.changes_of(layer) for layer in layers]
    reduced_changes = []
    for i, change in enumerate(blocks.get("changes", ())):
        if where := [f"layer == {at}" for at, changes in enumerate(holding) if i in changes]:
            reduced_changes.append({**change, "where": " or ".join(where)})
    blocks["changes"] = reduced_changes
    return data


def _mappings(data: Any) -> Iterator[dict[str, Any]]:
    if isinstance(data, dict):
        yield data
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from _mappings(value)
