"""Families with q, k and v in one matrix: GPT, GPT-2, BLOOM, GPT-NeoX."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from family import (
    ATTENTION,
    HEAD,
    ROPE,
    Family,
    KnownFamily,
    Table,
    biased,
    common,
    shape,
    transposed,
)
from torch import Tensor


def gpt2_config(rng: random.Random) -> Any:
    sizes = common(rng)
    sizes["n_inner"] = sizes.pop("intermediate_size")
    sizes["scale_attn_by_inverse_layer_idx"] = rng.random() < 0.5
    act = rng.choice(("gelu_new", "gelu", "relu"))
    return transformers.GPT2Config(**sizes, activation_function=act, layer_norm_epsilon=rng.choice((1e-5, 1e-3)))


ACTS = {"gelu_new": "gelu_tanh(x)", "gelu": "gelu(x)", "relu": "relu(x)"}


def openai_gpt_config(rng: random.Random) -> Any:
    sizes = common(rng)
    sizes.pop("intermediate_size")
    act = rng.choice(("gelu", "relu"))
    return transformers.OpenAIGPTConfig(**sizes, afn=act, layer_norm_epsilon=rng.choice((1e-5, 1e-3)))


def openai_gpt(config: Any) -> dict[str, Any]:
    layers = [
        {"kind": "attention", "heads": config.n_head, "bias": True},
        {"kind": "mlp", "ratio": 4, "act": {**ACTS, "gelu": "gelu_tanh(x)"}[config.afn], "bias": True},
    ]
    model = shape(config, {"kind": "layer", "eps": config.layer_norm_epsilon, "places": ["stream"]}, layers)
    model["embed"].append({"kind": "positions"})
    return {**model, "norm": None}


def bloom_config(rng: random.Random) -> Any:
    sizes = common(rng, apply_residual_connection_post_layernorm=rng.random() < 0.5)
    heads = rng.choice((3, 4, 6))  # slopes of 3 and 6 heads are those of 4 and 8, and some of twice as many
    sizes |= {"hidden_size": 8 * heads, "num_attention_heads": heads}
    del sizes["intermediate_size"], sizes["max_position_embeddings"]
    return transformers.BloomConfig(**sizes, layer_norm_epsilon=rng.choice((1e-5, 1e-3)))


def bloom(config: Any) -> dict[str, Any]:
    norm = {"kind": "layer", "eps": config.layer_norm_epsilon}
    written = {"write": "h + y"} if config.apply_residual_connection_post_layernorm else {}
    alibi = {"heads": config.n_head, "bias": True, "score": "s - slope(h) * (i - j)"}
    layers = [
        {"kind": "attention", **alibi, **written},
        {"kind": "mlp", "ratio": 4, "act": "gelu_tanh(x)", "bias": True, **written},
    ]
    model = shape(config, norm, layers)
    first = {"kind": "norm", "norm": "layer", "weight": "w", "bias": True, "eps": config.layer_norm_epsilon}
    model["embed"].append(first)
    return model


def gpt_neox_config(rng: random.Random) -> Any:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": rng.choice((0.25, 0.5, 1.0))}
    parallel = {"use_parallel_residual": rng.random() < 0.7, "attention_bias": rng.random() < 0.7}
    return transformers.GPTNeoXConfig(**common(rng), **parallel, rope_parameters=parameters)


def third(index: int) -> Callable[[Tensor, Any], Tensor]:
    """The part of q, k or v in a matrix of columns [D, 3 D], or in its bias."""
    return lambda tensor, config: (
        tensor.chunk(3, -1)[index].T.contiguous() if tensor.ndim == 2 else tensor.chunk(3)[index]
    )


def of_heads(index: int) -> Callable[[Tensor, Any], Tensor]:
    """The part of q, k or v in rows that are ordered by head."""
    return lambda tensor, config: tensor.unflatten(0, (config.num_attention_heads, 3, -1))[:, index].flatten(0, 1)


H = "transformer.h.{i}"
GPT2: Table = biased(
    {
        "attention.q": (f"{H}.attn.c_attn.weight", third(0)),
        "attention.k": (f"{H}.attn.c_attn.weight", third(1)),
        "attention.v": (f"{H}.attn.c_attn.weight", third(2)),
        "attention.out": (f"{H}.attn.c_proj.weight", transposed),
        "mlp.up": (f"{H}.mlp.c_fc.weight", transposed),
        "mlp.down": (f"{H}.mlp.c_proj.weight", transposed),
    }
)
OPENAI_NORMS: Table = {
    f"{layer}.stream_{part}": f"{H}.{theirs}.{part}"
    for layer, theirs in (("attention", "ln_1"), ("mlp", "ln_2"))
    for part in ("weight", "bias")
}
OPENAI_OUTSIDE: Table = {
    "embed.token": "transformer.tokens_embed.weight",
    "embed.positions": "transformer.positions_embed.weight",
}
BLOOM: Table = biased(
    {
        "attention.q": (f"{H}.self_attention.query_key_value.weight", of_heads(0)),
        "attention.k": (f"{H}.self_attention.query_key_value.weight", of_heads(1)),
        "attention.v": (f"{H}.self_attention.query_key_value.weight", of_heads(2)),
        "attention.out": f"{H}.self_attention.dense.weight",
        "mlp.up": f"{H}.mlp.dense_h_to_4h.weight",
        "mlp.down": f"{H}.mlp.dense_4h_to_h.weight",
    }
)
BLOOM_NORMS: Table = {
    f"{layer}.norm_{part}": f"{H}.{theirs}.{part}"
    for layer, theirs in (("attention", "input_layernorm"), ("mlp", "post_attention_layernorm"))
    for part in ("weight", "bias")
}
BLOOM_OUTSIDE: Table = {
    "embed.token": "transformer.word_embeddings.weight",
    "embed.norm_weight": "transformer.word_embeddings_layernorm.weight",
    "embed.norm_bias": "transformer.word_embeddings_layernorm.bias",
    "norm_weight": "transformer.ln_f.weight",
    "norm_bias": "transformer.ln_f.bias",
}


FAMILIES: Mapping[str, Family | KnownFamily] = {
    "gpt2": KnownFamily("gpt2", gpt2_config, (*ATTENTION, *HEAD)),
    "openai-gpt": Family(openai_gpt_config, openai_gpt, {**GPT2, **OPENAI_NORMS}, OPENAI_OUTSIDE, (*ATTENTION, *HEAD)),
    "bloom": Family(bloom_config, bloom, {**BLOOM, **BLOOM_NORMS}, BLOOM_OUTSIDE, (*ATTENTION, *HEAD)),
    "gpt_neox": KnownFamily("gpt_neox", gpt_neox_config, (*ATTENTION, *ROPE, *HEAD)),
}
