"""OLMo 2 (Team OLMo, 2024): norms after the layers, and norms of q and k over all heads."""

from specc.compiler.architectures.decoder import Decoder
from specc.compiler.blocks.attention import Attention
from specc.runtime.families.config import Config
from specc.runtime.families.family import Data, Family
from specc.runtime.families.fields import eps_of, feed_forward, heads, layer_of, sizes
from specc.runtime.families.positions import rope
from specc.runtime.families.sections import attention, bias, decoder, mlp, norm, qk_norm
from specc.runtime.families.tables import ATTENTION, BLOCK, DENSE, LAYER, OUTSIDE, QK_NORMS
from specc.runtime.families.tensors import same

AFTER = (
    same(f"{BLOCK}.attention.after_weight", f"{LAYER}.post_attention_layernorm.weight"),
    same(f"{BLOCK}.mlp.after_weight", f"{LAYER}.post_feedforward_layernorm.weight"),
)


def model(config: Config) -> Data:
    eps = config.number("rms_norm_eps", 1e-5)
    normed = {"qk_norm": qk_norm(eps, weight="w", over="all"), **bias(config, "attention_bias")}
    layers = [attention(config, rope(config), **normed), mlp(config)]
    return decoder(config, norm("rms", eps, weight="w", places=["after"]), layers, tied=False)


def config(model: Decoder) -> Data:
    more = {"rms_norm_eps": eps_of(model.norm), "attention_bias": bool(layer_of(model, Attention).bias)}
    return sizes(model) | heads(model) | feed_forward(model) | more


TABLE = (*OUTSIDE, *ATTENTION, *DENSE, *QK_NORMS, *AFTER)
FAMILY = Family("olmo2", "OLMo 2", "Olmo2ForCausalLM", model, config, lambda config: TABLE)
