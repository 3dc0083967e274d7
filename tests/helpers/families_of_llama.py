"""Families with the names of LLaMA: norms without biases, gated or squared MLPs, experts."""

import random
from collections.abc import Mapping
from typing import Any

import transformers
from family import (
    ATTENTION,
    CAPPED,
    HEAD,
    MLP,
    NORM_ROPE,
    ROPE,
    Family,
    KnownFamily,
    Table,
    attention,
    bias_of,
    biased,
    grouped,
    mlp,
    rope,
    shape,
)


def llama_config(rng: random.Random) -> Any:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": rng.choice((1e3, 5e5)),
        "factor": rng.choice((8.0, 32.0)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": rng.choice((32, 64, 256)),
    }
    sizes = grouped(rng, head_dim=16, tie_word_embeddings=rng.random() < 0.5, rms_norm_eps=1e-5)
    biases = {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}
    return transformers.LlamaConfig(**sizes, **biases, rope_parameters=scaling)


def qwen3_config(rng: random.Random) -> Any:
    sizes = grouped(rng, head_dim=rng.choice((8, 16)), tie_word_embeddings=rng.random() < 0.5)
    return transformers.Qwen3Config(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 1e6})


def mixtral_config(rng: random.Random) -> Any:
    experts = rng.choice((3, 4, 8))
    sizes = grouped(rng, tie_word_embeddings=rng.random() < 0.5, rms_norm_eps=1e-5)
    sizes["intermediate_size"] = 8 * rng.randint(2, 6)
    chosen = {"num_local_experts": experts, "num_experts_per_tok": rng.randint(2, experts)}
    return transformers.MixtralConfig(**sizes, **chosen, rope_parameters={"rope_type": "default", "rope_theta": 1e6})


def qwen3_moe_config(rng: random.Random) -> Any:
    sizes = grouped(rng, head_dim=rng.choice((8, 16)), tie_word_embeddings=rng.random() < 0.5, num_hidden_layers=3)
    chosen = {"num_experts": rng.choice((4, 6)), "num_experts_per_tok": rng.randint(2, 3), "moe_intermediate_size": 24}
    chosen |= {"norm_topk_prob": rng.random() < 0.5, "mlp_only_layers": rng.choice(([], [0], [0, 2]))}
    parameters = {"rope_type": "default", "rope_theta": 1e6}
    return transformers.Qwen3MoeConfig(**sizes, **chosen, rope_parameters=parameters)


def olmo2_config(rng: random.Random) -> Any:
    sizes = grouped(rng, tie_word_embeddings=rng.random() < 0.5, rms_norm_eps=1e-5)
    return transformers.Olmo2Config(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 5e5})


def gemma3_config(rng: random.Random) -> Any:
    pattern = rng.choice((2, 3))
    sizes = grouped(rng, head_dim=rng.choice((8, 16)), sliding_window=rng.choice((7, 16)), num_hidden_layers=4)
    kinds = ["full_attention" if i % pattern == pattern - 1 else "sliding_attention" for i in range(4)]
    bases = {"sliding_attention": 1e3, "full_attention": 1e6}
    parameters = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
    return transformers.Gemma3TextConfig(
        **sizes,
        layer_types=kinds,
        rope_parameters=parameters,
        query_pre_attn_scalar=rng.choice((8, 24)),
        final_logit_softcapping=rng.choice((None, 5.0)),
    )


def nanochat_config(rng: random.Random) -> Any:
    sizes = grouped(rng, tie_word_embeddings=False, hidden_act="relu2", final_logit_softcapping=rng.choice((5.0, 15.0)))
    return transformers.NanoChatConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 1e4})


def olmo_config(rng: random.Random) -> Any:
    sizes = grouped(rng, tie_word_embeddings=rng.random() < 0.5, clip_qkv=rng.choice((None, 0.5, 1.0)))
    return transformers.OlmoConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 1e4})


def olmo(config: Any) -> dict[str, Any]:
    config.head_dim = config.hidden_size // config.num_attention_heads
    clip = config.clip_qkv
    clipped = {name: f"min(max({name}, -{clip}), {clip})" for name in "qkv"} if clip is not None else {}
    layers = [attention(config, rope=rope(config.rope_parameters), **clipped), mlp(config)]
    return shape(config, {"kind": "layer", "weight": "none", "bias": False, "eps": 1e-5}, layers)


def cohere_config(rng: random.Random) -> Any:
    sizes = grouped(rng, use_qk_norm=rng.random() < 0.7, logit_scale=rng.choice((0.0625, 0.5)))
    biased = {"attention_bias": rng.random() < 0.5}
    return transformers.CohereConfig(**sizes, **biased, rope_parameters={"rope_type": "default", "rope_theta": 1e4})


def cohere(config: Any) -> dict[str, Any]:
    config.head_dim = config.hidden_size // config.num_attention_heads
    norm = {"kind": "layer", "bias": False, "eps": config.layer_norm_eps}
    scales = {"q_scale": {"shape": "heads * head_dim", "init": 1}, "k_scale": {"shape": "values", "init": 1}}
    of_heads = {
        "qk_norm": {"kind": "layer", "eps": config.layer_norm_eps},
        "learn": scales,
        "q": "q * q_scale",
        "k": "k * k_scale",
    }
    turned = rope(config.rope_parameters, pairs="neighbors")
    normed = of_heads if config.use_qk_norm else {}
    layers = [attention(config, rope=turned, **normed, **bias_of("attention_bias", config)), mlp(config)]
    model = shape(config, {**norm, "shared": True}, layers, write="x + attention + mlp")
    del model["norm"]["shared"]
    model["head"]["softcap"] = f"z * {config.logit_scale}"
    return model


LAYER = "model.layers.{i}"
OUTSIDE: Table = {
    "embed.token": "model.embed_tokens.weight",
    "norm_weight": "model.norm.weight",
    "head.logits": "lm_head.weight",
}
MATRICES: Table = biased(
    {
        "attention.q": f"{LAYER}.self_attn.q_proj.weight",
        "attention.k": f"{LAYER}.self_attn.k_proj.weight",
        "attention.v": f"{LAYER}.self_attn.v_proj.weight",
        "attention.out": f"{LAYER}.self_attn.o_proj.weight",
        "mlp.gate": f"{LAYER}.mlp.gate_proj.weight",
        "mlp.up": f"{LAYER}.mlp.up_proj.weight",
        "mlp.down": f"{LAYER}.mlp.down_proj.weight",
    }
)
NORMS: Table = {
    "attention.norm_weight": f"{LAYER}.input_layernorm.weight",
    "mlp.norm_weight": f"{LAYER}.post_attention_layernorm.weight",
}
HEAD_SCALES: Table = {
    "attention.q_scale": f"{LAYER}.self_attn.q_norm.weight",
    "attention.k_scale": f"{LAYER}.self_attn.k_norm.weight",
}


def mistral_config(rng: random.Random) -> Any:
    sizes = grouped(rng, sliding_window=rng.choice((None, 9, 16)), tie_word_embeddings=rng.random() < 0.5)
    return transformers.MistralConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 1e6})


FAMILIES: Mapping[str, Family | KnownFamily] = {
    "llama": KnownFamily("llama", llama_config, (*ATTENTION, *ROPE, *MLP, *HEAD)),
    "mistral": KnownFamily("mistral", mistral_config, (*ATTENTION, *ROPE, *MLP, *HEAD)),
    "qwen3": KnownFamily("qwen3", qwen3_config, (*ATTENTION, *NORM_ROPE, *MLP, *HEAD)),
    "mixtral": KnownFamily("mixtral", mixtral_config, (*ATTENTION, *ROPE, *HEAD)),
    "qwen3_moe": KnownFamily("qwen3_moe", qwen3_moe_config, (*ATTENTION, *NORM_ROPE, *HEAD)),
    "olmo2": KnownFamily("olmo2", olmo2_config, (*ATTENTION, *ROPE, *MLP, *HEAD)),
    "gemma3_text": KnownFamily("gemma3_text", gemma3_config, (*ATTENTION, *NORM_ROPE, *MLP)),
    "nanochat": KnownFamily("nanochat", nanochat_config, (*ATTENTION, *NORM_ROPE, *MLP)),
    "olmo": Family(olmo_config, olmo, MATRICES, OUTSIDE, (*ATTENTION, *ROPE, *MLP, *HEAD)),
    "cohere": Family(cohere_config, cohere, {**MATRICES, **HEAD_SCALES, **NORMS}, OUTSIDE, (*ATTENTION, *MLP, *CAPPED)),
}
