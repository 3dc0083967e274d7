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


def attention(config: Any, **more: Any) -> dict[str, Any]:
    """Attention with grouped queries and heads of a size of their own."""
    return {
        "kind": "attention",
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        **more,
    }


def mlp(config: Any, act: str = "silu(gate) * x", **more: Any) -> dict[str, Any]:
    return {"kind": "mlp", "hidden": config.intermediate_size, "act": act, **more}


def shape(config: Any, norm: dict[str, Any], layers: list[dict[str, Any]], **blocks: Any) -> dict[str, Any]:
    """A `model` section whose last norm is that before its layers."""
    last = {key: value for key, value in norm.items() if key != "places"}
    return {
        "dim": config.hidden_size,
        "embed": [{"kind": "token"}],
        "blocks": {"count": config.num_hidden_layers, "norm": norm, "layers": layers, **blocks},
        "norm": last,
        "head": {"tied": config.tie_word_embeddings},
    }


def rope(parameters: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The rotary positions of a config."""
    turned = {"base": parameters["rope_theta"], **more}
    if parameters["rope_type"] == "llama3":
        turned["scaling"] = {
            "kind": "llama3",
            "factor": parameters["factor"],
            "low": parameters["low_freq_factor"],
            "high": parameters["high_freq_factor"],
            "trained": parameters["original_max_position_embeddings"],
        }
    return turned


def own(name: str, config: Any) -> dict[str, bool]:
    """`bias: true` where the config says so."""
    return {"bias": True} if getattr(config, name) else {}


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


def llama(config: Any) -> dict[str, Any]:
    norm = {"kind": "rms", "weight": "w", "eps": config.rms_norm_eps}
    turned = rope(config.rope_parameters)
    biases = own("attention_bias", config), own("mlp_bias", config)
    return shape(config, norm, [attention(config, rope=turned, **biases[0]), mlp(config, **biases[1])])


def qwen3_config(rng: random.Random) -> Any:
    sizes = grouped(rng, head_dim=rng.choice((8, 16)), tie_word_embeddings=rng.random() < 0.5)
    return transformers.Qwen3Config(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 1e6})


def qwen3(config: Any) -> dict[str, Any]:
    norm = {"kind": "rms", "weight": "w", "eps": config.rms_norm_eps}
    qk_norm = {"weight": "w", "eps": config.rms_norm_eps}
    return shape(config, norm, [attention(config, qk_norm=qk_norm, rope=rope(config.rope_parameters)), mlp(config)])


def olmo2_config(rng: random.Random) -> Any:
    sizes = grouped(rng, tie_word_embeddings=rng.random() < 0.5, rms_norm_eps=1e-5)
    return transformers.Olmo2Config(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 5e5})


def olmo2(config: Any) -> dict[str, Any]:
    norm = {"kind": "rms", "weight": "w", "eps": config.rms_norm_eps}
    qk_norm = {"weight": "w", "eps": config.rms_norm_eps, "over": "all"}
    config.head_dim = config.hidden_size // config.num_attention_heads
    layers = [attention(config, qk_norm=qk_norm, rope=rope(config.rope_parameters)), mlp(config)]
    return shape(config, {**norm, "places": ["after"]}, layers)


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


def gemma3(config: Any) -> dict[str, Any]:
    weight = {"weight": "1 + w", "eps": config.rms_norm_eps}
    local, full = (config.rope_parameters[kind] for kind in ("sliding_attention", "full_attention"))
    scale = f"1/sqrt({config.query_pre_attn_scalar})"
    layers = [
        attention(
            config, qk_norm=weight, rope=rope(local), scale=scale, mask=f"j <= i and i - j < {config.sliding_window}"
        ),
        mlp(config, "gelu_tanh(gate) * x"),
    ]
    pattern = config.layer_types.index("full_attention") + 1
    changes = [{"where": f"layer % {pattern} == {pattern - 1}", "attention": {"rope": rope(full), "mask": "j <= i"}}]
    model = shape(config, {"kind": "rms", **weight, "places": ["before", "after"]}, layers, changes=changes)
    model["embed"].append({"kind": "scale", "by": "sqrt(dim)"})
    model["head"]["softcap"] = config.final_logit_softcapping
    return model


def nanochat_config(rng: random.Random) -> Any:
    sizes = grouped(rng, tie_word_embeddings=False, hidden_act="relu2", final_logit_softcapping=rng.choice((5.0, 15.0)))
    return transformers.NanoChatConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 1e4})


def nanochat(config: Any) -> dict[str, Any]:
    eps, turned = config.rms_norm_eps, {"base": config.rope_parameters["rope_theta"], "turn": "backward"}
    config.head_dim = config.hidden_size // config.num_attention_heads
    qk_norm = {"eps": eps, "after_rope": True}
    layers = [attention(config, qk_norm=qk_norm, rope=turned), mlp(config, "relu(x) ** 2")]
    model = shape(config, {"kind": "rms", "eps": eps}, layers)
    model["embed"].append({"kind": "norm", "eps": eps})
    model["head"]["softcap"] = config.final_logit_softcapping
    return model


def gpt2_config(rng: random.Random) -> Any:
    sizes = common(rng)
    sizes["n_inner"] = sizes.pop("intermediate_size")
    sizes["scale_attn_by_inverse_layer_idx"] = rng.random() < 0.5
    act = rng.choice(("gelu_new", "gelu", "relu"))
    return transformers.GPT2Config(**sizes, activation_function=act, layer_norm_epsilon=rng.choice((1e-5, 1e-3)))


ACTS = {"gelu_new": "gelu_tanh(x)", "gelu": "gelu(x)", "relu": "relu(x)"}


def gpt2(config: Any) -> dict[str, Any]:
    norm = {"kind": "layer", "eps": config.layer_norm_epsilon}
    by_layer = f"1/sqrt({config.n_embd // config.n_head})/(layer + 1)"
    scale = {"scale": by_layer} if config.scale_attn_by_inverse_layer_idx else {}
    layers = [
        {"kind": "attention", "heads": config.n_head, "bias": True, **scale},
        {
            "kind": "mlp",
            "hidden": config.n_inner or 4 * config.n_embd,
            "act": ACTS[config.activation_function],
            "bias": True,
        },
    ]
    model = shape(config, norm, layers)
    model["embed"].append({"kind": "positions"})
    return model


def gpt_neox_config(rng: random.Random) -> Any:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": rng.choice((0.25, 0.5, 1.0))}
    parallel = {"use_parallel_residual": rng.random() < 0.7, "attention_bias": rng.random() < 0.7}
    return transformers.GPTNeoXConfig(**common(rng), **parallel, rope_parameters=parameters)


def gpt_neox(config: Any) -> dict[str, Any]:
    dims = int(config.hidden_size // config.num_attention_heads * config.rope_parameters["partial_rotary_factor"])
    turned = rope(config.rope_parameters, dims=dims)
    layers = [
        {"kind": "attention", "heads": config.num_attention_heads, "rope": turned, **own("attention_bias", config)},
        mlp(config, "gelu(x)", bias=True),
    ]
    wiring = {"write": "x + attention + mlp"} if config.use_parallel_residual else {}
    return shape(config, {"kind": "layer", "eps": config.layer_norm_eps}, layers, **wiring)


def third(index: int) -> Callable[[Tensor, Any], Tensor]:
    """The part of q, k or v in a matrix of columns [D, 3 D], or in its bias."""
    return lambda tensor, config: (
        tensor.chunk(3, -1)[index].T.contiguous() if tensor.ndim == 2 else tensor.chunk(3)[index]
    )


def of_heads(index: int) -> Callable[[Tensor, Any], Tensor]:
    """The part of q, k or v in rows that are ordered by head."""
    return lambda tensor, config: tensor.unflatten(0, (config.num_attention_heads, 3, -1))[:, index].flatten(0, 1)


def transposed(tensor: Tensor, config: Any) -> Tensor:
    return tensor.T.contiguous()


def biased(table: Table) -> Table:
    """The table with a bias of every matrix that is a `weight`."""
    biases: dict[str, Row] = {}
    for name, row in table.items():
        theirs, map = (row, None) if isinstance(row, str) else row
        bias = theirs.removesuffix("weight") + "bias"
        biases[f"{name}_bias"] = bias if map in (None, transposed) else (bias, map)
    return {**table, **biases}


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
QK_NORMS: Table = {
    "attention.q_norm_weight": f"{LAYER}.self_attn.q_norm.weight",
    "attention.k_norm_weight": f"{LAYER}.self_attn.k_norm.weight",
}
NORMS: Table = {
    "attention.norm_weight": f"{LAYER}.input_layernorm.weight",
    "mlp.norm_weight": f"{LAYER}.post_attention_layernorm.weight",
}
AFTER: Table = {
    "attention.after_weight": f"{LAYER}.post_attention_layernorm.weight",
    "mlp.after_weight": f"{LAYER}.post_feedforward_layernorm.weight",
}
GEMMA: Table = {
    "attention.norm_weight": f"{LAYER}.input_layernorm.weight",
    "mlp.norm_weight": f"{LAYER}.pre_feedforward_layernorm.weight",
}
PLAIN_MLP: Table = {"mlp.up": f"{LAYER}.mlp.fc1.weight", "mlp.down": f"{LAYER}.mlp.fc2.weight"}
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
GPT2_NORMS: Table = {
    f"{layer}.norm_{part}": f"{H}.{theirs}.{part}"
    for layer, theirs in (("attention", "ln_1"), ("mlp", "ln_2"))
    for part in ("weight", "bias")
}
GPT2_OUTSIDE: Table = {
    "embed.token": "transformer.wte.weight",
    "embed.positions": "transformer.wpe.weight",
    "norm_weight": "transformer.ln_f.weight",
    "norm_bias": "transformer.ln_f.bias",
}
NEOX = "gpt_neox.layers.{i}"
GPT_NEOX: Table = biased(
    {
        "attention.q": (f"{NEOX}.attention.query_key_value.weight", of_heads(0)),
        "attention.k": (f"{NEOX}.attention.query_key_value.weight", of_heads(1)),
        "attention.v": (f"{NEOX}.attention.query_key_value.weight", of_heads(2)),
        "attention.out": f"{NEOX}.attention.dense.weight",
        "mlp.up": f"{NEOX}.mlp.dense_h_to_4h.weight",
        "mlp.down": f"{NEOX}.mlp.dense_4h_to_h.weight",
    }
)
NEOX_NORMS: Table = {
    f"{layer}.norm_{part}": f"{NEOX}.{theirs}.{part}"
    for layer, theirs in (("attention", "input_layernorm"), ("mlp", "post_attention_layernorm"))
    for part in ("weight", "bias")
}
NEOX_OUTSIDE: Table = {
    "embed.token": "gpt_neox.embed_in.weight",
    "norm_weight": "gpt_neox.final_layer_norm.weight",
    "norm_bias": "gpt_neox.final_layer_norm.bias",
    "head.logits": "lm_head.weight",
}
ATTENTION = ({"blocks.*.attention": ["y"]},)
ROPE = ({"blocks.*.attention": ["q.rope"]}, {"blocks.*.attention": ["k.rope"]})
MLP = ({"blocks.*.mlp": ["up", "act", "down"]},)
HEAD = ({"head": ["logits", "loss"]},)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(llama_config, llama, {**MATRICES, **NORMS}, OUTSIDE, (*ATTENTION, *ROPE, *MLP, *HEAD)),
    "qwen3": Family(qwen3_config, qwen3, {**MATRICES, **QK_NORMS, **NORMS}, OUTSIDE, (*ATTENTION, *ROPE, *MLP, *HEAD)),
    "olmo2": Family(olmo2_config, olmo2, {**MATRICES, **QK_NORMS, **AFTER}, OUTSIDE, (*ATTENTION, *ROPE, *MLP, *HEAD)),
    "gemma3_text": Family(
        gemma3_config, gemma3, {**MATRICES, **QK_NORMS, **AFTER, **GEMMA}, OUTSIDE, (*ATTENTION, *ROPE, *MLP)
    ),
    "nanochat": Family(nanochat_config, nanochat, {**MATRICES, **PLAIN_MLP}, OUTSIDE, (*ATTENTION, *ROPE, *MLP)),
    "gpt2": Family(gpt2_config, gpt2, {**GPT2, **GPT2_NORMS}, GPT2_OUTSIDE, (*ATTENTION, *HEAD)),
    "gpt_neox": Family(gpt_neox_config, gpt_neox, {**GPT_NEOX, **NEOX_NORMS}, NEOX_OUTSIDE, (*ATTENTION, *ROPE, *HEAD)),
}
