"""Families of decoders as `transformers` has them: a random config, the spec that says it, and a table of names.

A table has a row per parameter of ours: the parameter of theirs, and a linear map where the tensors differ. Gradients
take the same map.
"""

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is looked up anywhere: models are made from configs

import torch
import transformers
from torch import Tensor, nn

CONTEXT = 64
Row = str | tuple[str, Callable[[Tensor, Any], Tensor]]
Table = Mapping[str, Row]


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        config: draws a config.
        model: the `model` section of the spec of a config.
        table: parameters of ours, with `{i}` for the block, to parameters of theirs.
        embedded: parameters of ours that stand outside the blocks; `head.logits` only where the head is not tied.
        fuse: the fusion points that the family has.
    """

    config: Callable[[random.Random], Any]
    model: Callable[[Any], dict[str, Any]]
    table: Table
    outside: Table
    fuse: tuple[Mapping[str, list[str]], ...]

    def spec(self, config: Any) -> dict[str, Any]:
        """The spec of a config, as the data of its YAML file."""
        return {
            "spec_version": 2,
            "name": config.model_type,
            "targets": ["cpu"],
            "model": {"kind": "decoder", "vocab": config.vocab_size, "context": CONTEXT, **self.model(config)},
            "fuse": list(self.fuse),
            "train": {
                "micro_batch": 2,
                "tokens_per_step": 2 * CONTEXT,
                "data": {"tokenizer": "any.model"},
                "steps": 2,
                "optimizers": [{"kind": "adamw", "match": "*", "lr": 0.01}],
            },
        }

    def row(self, name: str) -> Row:
        """The row of a parameter of ours, with the block filled in."""
        if name in self.outside:
            return self.outside[name]
        _, layer, rest = name.split(".", 2)
        row = self.table[rest]
        return row.format(i=layer) if isinstance(row, str) else (row[0].format(i=layer), row[1])

    def ours(self, name: str, theirs: Mapping[str, Tensor], config: Any) -> Tensor:
        """A parameter of ours, of their tensors."""
        row = self.row(name)
        return theirs[row] if isinstance(row, str) else row[1](theirs[row[0]], config)


def randomized(config: Any, seed: int) -> nn.Module:
    """A model of `transformers` in which no parameter is at its initial value: weights of ones and biases of zeros hide
    errors."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim > 1:
                value.normal_(std=value.shape[-1] ** -0.5)
            else:
                start = value.clone() if "norm" in name or "ln_" in name else 0
                value.normal_(std=0.3).add_(start)
    return model.eval()


def common(rng: random.Random, **more: Any) -> dict[str, Any]:
    """Sizes that every family has."""
    heads = rng.choice((2, 4, 6))
    return {
        "vocab_size": rng.randint(30, 60),
        "hidden_size": heads * 8 * rng.randint(1, 2),
        "num_hidden_layers": rng.randint(2, 4),
        "num_attention_heads": heads,
        "intermediate_size": 4 * rng.randint(5, 15),
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
        **more,
    }


def grouped(rng: random.Random, **more: Any) -> dict[str, Any]:
    """Sizes with fewer key heads, and heads of a size of their own."""
    sizes = common(rng, **more)
    sizes["num_key_value_heads"] = sizes["num_attention_heads"] // rng.choice((1, 2))
    return sizes


def llama() -> Family:
    def config(rng: random.Random) -> Any:
        rope = {
            "rope_type": "llama3",
            "rope_theta": rng.choice((1e3, 5e5)),
            "factor": rng.choice((8.0, 32.0)),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": rng.choice((32, 64, 256)),
        }
        return transformers.LlamaConfig(
            **grouped(rng, head_dim=16, tie_word_embeddings=rng.random() < 0.5, rms_norm_eps=1e-5),
            rope_parameters=rope,
        )

    return Family(config, _llama_model, LLAMA, OUTSIDE, FUSE)


def rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary positions of a config."""
    turned = {"base": parameters["rope_theta"], "turn": "forward"}
    if parameters["rope_type"] == "llama3":
        turned["scaling"] = {
            "kind": "llama3",
            "factor": parameters["factor"],
            "low": parameters["low_freq_factor"],
            "high": parameters["high_freq_factor"],
            "trained": parameters["original_max_position_embeddings"],
        }
    return turned


def _llama_model(config: Any) -> dict[str, Any]:
    norm = {"kind": "rms", "affine": True, "eps": config.rms_norm_eps}
    return {
        "dim": config.hidden_size,
        "embed": [{"kind": "token"}],
        "blocks": {
            "count": config.num_hidden_layers,
            "norm": norm,
            "layers": [
                {
                    "kind": "attention",
                    "heads": config.num_attention_heads,
                    "kv_heads": config.num_key_value_heads,
                    "head_dim": config.head_dim,
                    "rope": rope(config.rope_parameters),
                },
                {"kind": "mlp", "hidden": config.intermediate_size, "act": "silu(gate) * x"},
            ],
        },
        "norm": norm,
        "head": {"tied": config.tie_word_embeddings},
    }


OUTSIDE: Table = {
    "embed.token": "model.embed_tokens.weight",
    "norm_weight": "model.norm.weight",
    "head.logits": "lm_head.weight",
}
LAYER = "model.layers.{i}"
MLP: Table = {
    "mlp.gate": f"{LAYER}.mlp.gate_proj.weight",
    "mlp.up": f"{LAYER}.mlp.up_proj.weight",
    "mlp.down": f"{LAYER}.mlp.down_proj.weight",
}
ATTENTION: Table = {
    "attention.q": f"{LAYER}.self_attn.q_proj.weight",
    "attention.k": f"{LAYER}.self_attn.k_proj.weight",
    "attention.v": f"{LAYER}.self_attn.v_proj.weight",
    "attention.out": f"{LAYER}.self_attn.o_proj.weight",
}
LLAMA: Table = {
    **ATTENTION,
    **MLP,
    "attention.norm_weight": f"{LAYER}.input_layernorm.weight",
    "mlp.norm_weight": f"{LAYER}.post_attention_layernorm.weight",
}
FUSE = (
    {"blocks.*.attention": ["y"]},
    {"blocks.*.attention": ["q.rope"]},
    {"blocks.*.attention": ["k.rope"]},
    {"blocks.*.mlp": ["up", "act", "down"]},
    {"head": ["logits", "loss"]},
)
FAMILIES: Mapping[str, Family] = {"llama": llama()}
