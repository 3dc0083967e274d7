"""Finds a family of Transformers that can represent the model of a spec.

Also computes the config of the model in this family. If no family can represent the model, the error states the first
difference from the closest family.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from specc.compiler.architectures.architecture import Architecture
from specc.compiler.architectures.decoder import Decoder
from specc.compiler.blocks.attention import Attention
from specc.compiler.blocks.latent import Latent
from specc.compiler.blocks.mlp import FeedForward
from specc.compiler.programs.programs import LoweringError, Programs
from specc.compiler.strict import StrictModel
from specc.runtime.errors import RuntimeFailure
from specc.runtime.families.config import Config, ConfigError
from specc.runtime.families.family import Data, Family, NotOfFamily, families

OF_TRAINING = ("init", "output_init", "dropout")  # fields that do not change the function of the model


class NoFamily(RuntimeFailure):
    """Raised if none of the supported families of Transformers can represent a model (exit code 2)."""

    code = "U013"
    exit_code = 2


@dataclass(frozen=True, slots=True)
class Recognized:
    """The family of a model, and the fields of config.json that describe the model in this family."""

    family: Family
    config: Data


def recognized(model: Architecture, first: str = "") -> Recognized:
    """Returns a family that fits a model, and the config of the model in this family.

    A family fits if `specc import` would convert the returned config to a model that computes the same function as
    `model`.

    Args:
        model: the model of a spec.
        first: the name of the family to prefer if several families fit; empty for no preference.

    Raises:
        NoFamily: if no family fits. The message states the first difference from the closest family.
    """
    if not isinstance(model, Decoder):
        raise NoFamily(
            "the model translates lines, but all families of Transformers that specc writes are decoders of text",
            "export it as safetensors",
        )
    known = sorted(families().values(), key=lambda family: family.name != first)
    reasons: list[tuple[int, str]] = []
    for family in known:
        result = _as_family(model, family)
        if isinstance(result, Recognized):
            return result
        reasons.append((len(result), f"{family.title} comes closest: {result[0]}"))
    hint = "change the spec, or export it as safetensors"
    raise NoFamily(f"no family of Transformers has this model; {min(reasons, key=lambda r: r[0])[1]}", hint)


def _as_family(model: Decoder, family: Family) -> Recognized | Sequence[str]:
    try:
        config = family.config(model)
        said = decoder_of(family, config)
    except NotOfFamily as error:
        return [str(error)] * error.distance
    except (ConfigError, ValidationError, LoweringError) as error:
        return [getattr(error, "message", str(error).partition("\n")[0])] * 100
    if same_programs(model, said):
        return Recognized(family, config)
    return differences(model, said) or ["an expression is written in another form"]


def decoder_of(family: Family, config: Mapping[str, Any]) -> Decoder:
    """Returns the model that the fields of a config.json describe. Raises ConfigError if the fields are not valid."""
    return Decoder.model_validate_json(json.dumps(family.model(Config(config))))


def same_programs(model: Decoder, other: Decoder) -> bool:
    if _sizes(model) != _sizes(other):
        return False
    return _facts(_function_of(model).lower("model")) == _facts(_function_of(other).lower("model"))


def _function_of(model: Decoder) -> Decoder:
    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(inner) for key, inner in value.items() if key not in ("dropout", "cache")}
        return [strip(inner) for inner in value] if isinstance(value, list) else value

    return Decoder.model_validate_json(json.dumps(strip(model.model_dump(mode="json", by_alias=True))))


def _sizes(model: Decoder) -> tuple[int, int, int, int]:
    return model.vocab, model.dim, model.context, model.blocks.count


def _facts(programs: Programs) -> object:
    params = sorted((param.name, param.shape, param.dtype) for param in programs.params)
    graphs = [(graph.name, graph.inputs, graph.nodes, graph.outputs) for graph in programs.graphs]
    return params, graphs


def differences(model: Decoder, other: Decoder) -> list[str]:
    """Returns a text for each field in which a model differs from the model `other` of a family.

    An example is `blocks.0.mlp.act is relu(x), but gelu(x) in the family`.
    """
    here, there = dict(_fields(model)), dict(_fields(other))
    paths = [path for path in {**here, **there} if here.get(path) != there.get(path)]
    return [f"{path} is {_shown(here.get(path))}, but {_shown(there.get(path))} in the family" for path in paths]


def _shown(value: Any) -> str:
    return "unset" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def _fields(model: Decoder) -> Iterator[tuple[str, Any]]:
    """Yields (path, value) for each field of a model. Fields that the spec omits have their default values."""
    for name in ("vocab", "dim", "context", "prefix"):
        yield name, getattr(model, name)
    yield "embed", [_dump(step) for step in model.embed]
    yield "blocks.count", model.blocks.count
    yield "blocks.order", str(model.blocks.order) if model.blocks.order is not None else None
    yield "blocks.common", [*model.blocks.common] or None
    for i, block in enumerate(model.blocks.every):
        yield f"blocks.{i}.norm", _dump(block.norm)
        for name in ("learn", "read", "write"):
            yield f"blocks.{i}.{name}", getattr(block, name) or None
        yield f"blocks.{i}.layers", [layer.title for layer in block.layers]
        for layer in block.layers:
            fields = _dump(layer)
            if isinstance(layer, FeedForward):
                fields |= {"hidden": layer.width(model.dim), "ratio": None}
            elif isinstance(layer, Attention):
                fields |= {"kv_heads": layer.kv_heads or layer.heads, "head_dim": layer.size(model.dim)}
            elif isinstance(layer, Latent):
                keys = layer.head_dim or model.dim // layer.heads
                fields |= {"head_dim": keys, "v_dim": layer.v_dim or keys}
            for name, value in fields.items():
                yield f"blocks.{i}.{layer.title}.{name}", value
    yield "norm", _dump(model.norm)
    for name, value in _dump(model.head).items():
        yield f"head.{name}", value


def _dump(part: StrictModel | None) -> dict[str, Any]:
    if part is None:
        return {}
    return {key: value for key, value in part.model_dump(mode="json").items() if key not in OF_TRAINING}
