"""GPT-NeoX and Pythia (Black et al., 2022): parallel layers, partial rotary positions, q, k and v in one matrix."""

from collections.abc import Sequence

from specc.compiler.architectures.decoder import Decoder
from specc.compiler.blocks.attention import Attention
from specc.runtime.families.config import Config
from specc.runtime.families.family import Data, Family
from specc.runtime.families.fields import eps_of, feed_forward, layer_of, sizes
from specc.runtime.families.gpt2 import QKV, norms
from specc.runtime.families.positions import rope, rope_parameters
from specc.runtime.families.sections import attention, bias, decoder, mlp, norm, require_divisor
from specc.runtime.families.tables import BLOCK
from specc.runtime.families.tensors import TensorMapping, joint_heads, same, with_biases

NEOX = "gpt_neox.layers.{i}"


def model(config: Config) -> Data:
    require_divisor(config)
    heads, dim = config.whole("num_attention_heads"), config.whole("hidden_size")
    size = dim // heads
    dims = int(size * _share(config))
    turned = rope(config, old="rotary_emb_base", dims=dims)
    turned = {"dims": dims, **turned} if dims != size else {key: turned[key] for key in turned if key != "dims"}
    layers = [
        attention(config, turned, **bias(config, "attention_bias", True)),
        mlp(config, "gelu", gated=False, bias=True),
    ]
    parallel = config.flag("use_parallel_residual", True)
    wiring = {"write": "x + attention + mlp"} if parallel else {}
    return decoder(config, norm("layer", config.number("layer_norm_eps", 1e-5)), layers, False, **wiring)


def _share(config: Config) -> float:
    share = config.number("rotary_pct", 0.25)
    share = config.number("partial_rotary_factor", share)
    parameters = config.inner("rope_parameters")
    return parameters.number("partial_rotary_factor", share) if parameters is not None else share


def config(model: Decoder) -> Data:
    layer = layer_of(model, Attention)
    size = layer.size(model.dim)
    dims = (layer.rope.dims if layer.rope is not None else None) or size
    return (
        sizes(model)
        | feed_forward(model, gated=False)
        | {
            "num_attention_heads": layer.heads,
            "rope_parameters": rope_parameters(layer.rope, {"partial_rotary_factor": dims / size}),
            "attention_bias": bool(layer.bias),
            "layer_norm_eps": eps_of(model.norm),
            "use_parallel_residual": model.blocks.write is not None,
        }
    )


def table(config: Config) -> Sequence[TensorMapping]:
    heads = config.whole("num_attention_heads")
    size = config.whole("hidden_size") // heads
    matrices = [
        joint_heads(QKV, f"{NEOX}.attention.query_key_value.weight", heads, (size, size, size)),
        same(f"{BLOCK}.attention.out", f"{NEOX}.attention.dense.weight"),
        same(f"{BLOCK}.mlp.up", f"{NEOX}.mlp.dense_h_to_4h.weight"),
        same(f"{BLOCK}.mlp.down", f"{NEOX}.mlp.dense_4h_to_h.weight"),
    ]
    return (
        same("embed.token", "gpt_neox.embed_in.weight"),
        same("norm_weight", "gpt_neox.final_layer_norm.weight"),
        same("norm_bias", "gpt_neox.final_layer_norm.bias"),
        same("head.logits", "embed_out.weight"),
        *with_biases(matrices),
        *norms(NEOX, (("attention", "input_layernorm"), ("mlp", "post_attention_layernorm"))),
    )


FAMILY = Family(
    "gpt_neox",
    "GPT-NeoX",
    "GPTNeoXForCausalLM",
    model,
    config,
    table,
    tuple(f"gpt_neox.layers.*.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
)
