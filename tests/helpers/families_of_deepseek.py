"""Families with latent attention: DeepSeek-V2."""

import random
from typing import Any

import transformers
from family import HEAD, KnownFamily, common


def deepseek_config(rng: random.Random) -> Any:
    heads, channels = rng.choice((2, 4)), rng.choice((8, 16))
    default = {"rope_type": "default", "rope_theta": 1e4}
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    sizes = common(rng, hidden_size=rng.choice((32, 48)), num_attention_heads=heads, num_key_value_heads=heads)
    ranks = {"kv_lora_rank": rng.choice((12, 24)), "q_lora_rank": rng.choice((None, 20))}
    parts = {"qk_nope_head_dim": channels, "qk_rope_head_dim": 8, "v_head_dim": rng.choice((8, 12))}
    return transformers.DeepseekV2Config(
        **sizes,
        **ranks,
        **parts,
        head_dim=8,
        n_routed_experts=rng.choice((4, 6)),
        n_shared_experts=rng.randint(1, 2),
        num_experts_per_tok=rng.randint(1, 3),
        moe_intermediate_size=16,
        first_k_dense_replace=rng.randint(0, 2),
        routed_scaling_factor=rng.choice((1.0, 2.5)),
        rope_parameters=rng.choice((default, {**yarn, "mscale": 0.707, "mscale_all_dim": 0.707})),
    )


FAMILIES = {"deepseek_v2": KnownFamily("deepseek_v2", deepseek_config, ({"blocks.*.latent": ["y"]}, *HEAD))}
