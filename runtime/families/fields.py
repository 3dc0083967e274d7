"""Computes fields of a config from the model of a spec. Several families use these functions."""

from typing import Any, TypeVar

from specc.compiler.architectures.decoder import Decoder
from specc.compiler.blocks.attention import Attention
from specc.compiler.blocks.mlp import FeedForward, Mlp
from specc.compiler.blocks.parts import Norm
from specc.runtime.families.activations import name_of
from specc.runtime.families.family import Data, NotOfFamily
from specc.runtime.families.positions import rope_parameters
from specc.runtime.families.sections import EPS

L = TypeVar("L")


def window_of(mask: Any) -> int | None:
    """Returns the window length of a mask that the function `sections.window` wrote; None for any other mask."""
    start = "j <= i and i - j < "
    digits = mask.removeprefix(start) if isinstance(mask, str) and mask.startswith(start) else ""
    return int(digits) if digits.isdecimal() else None


def layer_of(model: Decoder, kind: type[L], index: int = 0) -> L:
    for layer in model.blocks.every[index].layers:
        if isinstance(layer, kind):
            return layer
    raise NotOfFamily(f"block {index} has no layer of kind {kind.__name__.lower()}")


def eps_of(norm: Norm | None) -> float:
    if norm is None:
        raise NotOfFamily("the model lacks a norm that every model of the family has")
    return float(getattr(norm, "eps", EPS["rms"]))


def sizes(model: Decoder) -> Data:
    """Returns the fields of a config that state the sizes of a model."""
    return {
        "vocab_size": model.vocab,
        "hidden_size": model.dim,
        "num_hidden_layers": model.blocks.count,
        "max_position_embeddings": model.context,
        "tie_word_embeddings": model.head.tied,
    }


def softcap_of(model: Decoder) -> float | None:
    """Returns the softcap of the logits; None if the model has no softcap or the softcap is not a constant."""
    cap = model.head.softcap
    return cap if isinstance(cap, float) else None


def heads(model: Decoder) -> Data:
    """Returns the fields of a config that state the heads and the rotary positions of the first attention layer."""
    layer = layer_of(model, Attention)
    return {
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads or layer.heads,
        "head_dim": layer.size(model.dim),
        "rope_parameters": rope_parameters(layer.rope),
    }


def feed_forward(model: Decoder, kind: type[FeedForward] = Mlp, key: str = "hidden_act", gated: bool = True) -> Data:
    """Returns the fields of a config that state the width and the activation of the first layer of class `kind`.

    Args:
        model: the model.
        kind: the class of the layer.
        key: the name of the config field for the activation.
        gated: whether the layers of the family have a gate.

    Raises:
        NotOfFamily: the model has no layer of class `kind`, or config.json has no name for the activation.
    """
    layer = first_of(model, kind)
    name = name_of(layer.expression, gated)
    if name is None:
        raise NotOfFamily(f"configs have no name for the activation {layer.expression}", 50)
    return {"intermediate_size": layer.width(model.dim), key: name}


def first_of(model: Decoder, kind: type[L]) -> L:
    for _, _, layer in model.blocks.all_layers:
        if isinstance(layer, kind):
            return layer
    raise NotOfFamily(f"the model has no layer of kind {kind.__name__.lower()}")
