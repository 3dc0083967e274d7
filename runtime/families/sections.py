"""Computes sections of a spec from the fields of a config. Several families use these functions."""

from collections.abc import Sequence
from typing import Any

from specc.compiler.blocks.moe import SINGLE_EXPERT
from specc.runtime.families.activations import activation
from specc.runtime.families.config import Config
from specc.runtime.families.family import Data

EPS = {"rms": 1e-6, "layer": 1e-5}  # the defaults of a spec


def norm(kind: str, eps: float, **more: Any) -> Data:
    return {"kind": kind, **more, **({"eps": eps} if eps != EPS[kind] else {})}


def qk_norm(eps: float, **more: Any) -> Data:
    return {**more, **({"eps": eps} if eps != EPS["rms"] else {})}


def attention(
    config: Config, rope: Data, head_dim: int | None = None, kv_heads: int | None = None, **more: Any
) -> Data:
    """Returns a layer of attention with grouped queries, as data of a spec.

    Args:
        config: the config.
        rope: the section `rope` of the layer.
        head_dim: the default number of channels per head. None selects the number of features divided by the number of
            heads.
        kv_heads: the default number of key heads. None selects the number of query heads.
        more: other fields of the layer. They precede `rope` in the spec.
    """
    heads, dim = config.whole("num_attention_heads"), config.whole("hidden_size")
    groups = config.whole("num_key_value_heads", config.absent("num_key_value_heads", kv_heads) or heads)
    usual = dim // heads
    size = config.whole("head_dim", head_dim or max(usual, 1))
    if groups > heads or heads % groups:
        raise config.error("num_key_value_heads", f"{groups} does not divide {heads} heads", "use a divisor of them")
    stated = {"heads": heads, "kv_heads": groups if groups != heads else None}
    stated["head_dim"] = size if size * heads != dim else None
    return {"kind": "attention", **{key: value for key, value in stated.items() if value}, **more, "rope": rope}


def require_divisor(config: Config) -> None:
    """Raises ConfigError if the number of heads does not divide the number of features.

    Transformers has this requirement for some families, even if the config contains `head_dim`.
    """
    heads, dim = config.whole("num_attention_heads"), config.whole("hidden_size")
    if dim % heads:
        raise config.error("num_attention_heads", f"it does not divide hidden_size, {dim}", "use a divisor of it")


def mlp(config: Config, act: str = "silu", key: str = "hidden_act", gated: bool = True, **more: Any) -> Data:
    """Returns a dense feed-forward layer, as data of a spec.

    Args:
        config: the config.
        act: the default activation of the family.
        key: the name of the config field for the activation.
        gated: whether the layer has a gate.
        more: other fields of the layer.

    Raises:
        ConfigError: a field is not valid, or the activation is unknown.
    """
    hidden = config.whole("intermediate_size")
    return {"kind": "mlp", "hidden": hidden, "act": activation(config, key, act, gated), **more}


def bias(config: Config, key: str, default: bool = False) -> Data:
    """Returns `bias: true` for a spec if the field `key` of the config is true; otherwise an empty mapping."""
    return {"bias": True} if config.flag(key, default) else {}


def decoder(config: Config, norm: Data, layers: Sequence[Data], tied: bool, **blocks: Any) -> Data:
    """Returns a section `model` in which `norm` is both the norm of the blocks and the final norm.

    Args:
        config: the config.
        norm: the norm, as data of a spec.
        layers: the layers of a block, as data of a spec.
        tied: whether the output head shares the weights of the token embedding by default.
        blocks: other fields of the section `blocks`.
    """
    last = {key: value for key, value in norm.items() if key not in ("places", "shared")}
    before = {key: value for key, value in blocks.items() if key != "changes"}
    after = {key: value for key, value in blocks.items() if key == "changes"}
    count = config.whole("num_hidden_layers", most=1000)
    return {
        "kind": "decoder",
        "vocab": config.whole("vocab_size"),
        "dim": config.whole("hidden_size"),
        "context": config.whole("max_position_embeddings"),
        "embed": [{"kind": "token"}],
        "blocks": {"count": count, "norm": norm, **before, "layers": [*layers], **after},
        "norm": last,
        "head": {"tied": config.flag("tie_word_embeddings", tied)},
    }


def window(config: Config, usual: int | None = None) -> Data:
    """Returns the field `mask` for sliding-window attention; an empty mapping if the config has no window.

    `usual` is the window length if the config has no field `sliding_window`. If the field is null, attention has no
    window.
    """
    size = config.whole("sliding_window") if config.stated("sliding_window") else config.absent("sliding_window", usual)
    return {"mask": f"j <= i and i - j < {size}"} if size is not None else {}


def moe(config: Config, experts: int, hidden: int, router: Data, **more: Any) -> Data:
    """Returns a layer with routed experts, as data of a spec. The layer has the name `mlp`.

    Args:
        config: the config.
        experts: the number of experts.
        hidden: the number of inner features per expert.
        router: the fields of the router.
        more: other fields of the layer.

    Raises:
        ConfigError: a field is not valid, or the router would have no gradient.
    """
    chosen = {"experts": experts, "top_k": config.whole("num_experts_per_tok", most=experts)}
    if chosen["top_k"] == 1 and "normalize" in router:
        hint = "specc needs a num_experts_per_tok of at least 2 in this family"
        raise config.error("num_experts_per_tok", SINGLE_EXPERT, hint)
    act = activation(config, "hidden_act", "silu", True)
    stated = {"router": router} if router else {}
    return {"kind": "moe", "name": "mlp", **chosen, **more, "hidden": hidden, "act": act, **stated}
