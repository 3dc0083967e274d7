"""GPT-2 (Radford et al., 2019): learned positions, biases, and matrices stored as [inputs, outputs]."""

from collections.abc import Sequence

from specc.compiler.architectures.decoder import Decoder
from specc.compiler.blocks.attention import Attention
from specc.runtime.families.activations import activation
from specc.runtime.families.config import Config
from specc.runtime.families.family import Data, Family
from specc.runtime.families.fields import eps_of, feed_forward, layer_of
from specc.runtime.families.sections import norm
from specc.runtime.families.tables import BLOCK
from specc.runtime.families.tensors import TensorMapping, joint_columns, same, transposed, with_biases

H = "transformer.h.{i}"


def model(config: Config) -> Data:
    dim, heads = config.whole("n_embd", 768), config.whole("n_head", 12)
    eps = config.number("layer_norm_epsilon", 1e-5)
    if dim % heads:
        raise config.error("n_head", f"it does not divide n_embd, {dim}", "use a divisor of it")
    config.fixed("scale_attn_weights", (True,), "specc does not import scores without a scale")
    config.fixed("add_cross_attention", (False,), "cross attention needs an encoder, which specc does not import")
    config.value("reorder_and_upcast_attn")  # read and ignored, because this field changes only the precision
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
    scale = {"scale": "1/sqrt(head_dim)/(layer + 1)"} if by_layer else {}
    act = activation(config, "activation_function", "gelu_new", False)
    inner = config.whole("n_inner", 4 * dim)
    width: Data = {"ratio": 4} if inner == 4 * dim else {"hidden": inner}
    attention = {"kind": "attention", "heads": heads, "bias": True, **scale}
    layers = [attention, {"kind": "mlp", **width, "act": act, "bias": True}]
    normed = norm("layer", eps)
    return {
        "kind": "decoder",
        "vocab": config.whole("vocab_size", 50257),
        "dim": dim,
        "context": config.whole("n_positions", 1024),
        "embed": [{"kind": "token"}, {"kind": "positions"}],
        "blocks": {"count": config.whole("n_layer", 12, most=1000), "norm": normed, "layers": layers},
        "norm": normed,
        "head": {"tied": config.flag("tie_word_embeddings", True)},
    }


def config(model: Decoder) -> Data:
    layer = layer_of(model, Attention)
    inner = feed_forward(model, key="activation_function", gated=False)
    return {
        "vocab_size": model.vocab,
        "n_embd": model.dim,
        "n_layer": model.blocks.count,
        "n_head": layer.heads,
        "n_positions": model.context,
        "n_inner": inner["intermediate_size"],
        "activation_function": inner["activation_function"],
        "layer_norm_epsilon": eps_of(model.norm),
        "scale_attn_by_inverse_layer_idx": "layer" in str(layer.scale),
        "tie_word_embeddings": model.head.tied,
    }


def norms(block: str, names: Sequence[tuple[str, str]]) -> tuple[TensorMapping, ...]:
    """Returns the tensor mappings for the weights and biases of LayerNorms.

    Args:
        block: the prefix that the tensors of a block have in the file.
        names: pairs (layer that reads the norm, name of the norm in the file).
    """
    return tuple(
        same(f"{BLOCK}.{layer}.norm_{part}", f"{block}.{theirs}.{part}")
        for layer, theirs in names
        for part in ("weight", "bias")
    )


QKV = tuple(f"{BLOCK}.attention.{name}" for name in "qkv")
MATRICES = with_biases(
    [
        joint_columns(QKV, f"{H}.attn.c_attn.weight"),
        transposed(f"{BLOCK}.attention.out", f"{H}.attn.c_proj.weight"),
        transposed(f"{BLOCK}.mlp.up", f"{H}.mlp.c_fc.weight"),
        transposed(f"{BLOCK}.mlp.down", f"{H}.mlp.c_proj.weight"),
    ]
)
TABLE = (
    same("embed.token", "transformer.wte.weight"),
    same("embed.positions", "transformer.wpe.weight"),
    same("norm_weight", "transformer.ln_f.weight"),
    same("norm_bias", "transformer.ln_f.bias"),
    same("head.logits", "lm_head.weight"),
    *MATRICES,
    *norms(H, (("attention", "ln_1"), ("mlp", "ln_2"))),
)
FAMILY = Family(
    "gpt2",
    "GPT-2",
    "GPT2LMHeadModel",
    model,
    config,
    lambda config: TABLE,
    ("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
    "transformer.",
)
