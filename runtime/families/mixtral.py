"""Mixtral (Jiang et al., 2024): Mistral with experts in every layer."""

from specc.compiler.architectures.decoder import Decoder
from specc.compiler.blocks.attention import Attention
from specc.compiler.blocks.moe import Moe
from specc.runtime.families.config import Config
from specc.runtime.families.family import Data, Family
from specc.runtime.families.fields import eps_of, feed_forward, first_of, heads, layer_of, sizes, window_of
from specc.runtime.families.positions import rope
from specc.runtime.families.sections import attention, decoder, moe, norm, window
from specc.runtime.families.tables import ATTENTION, LAYER, NORMS, OUTSIDE, routed_experts


def model(config: Config) -> Data:
    count = config.whole("num_local_experts", config.whole("num_experts", 8), most=32768)
    config.whole("num_experts_per_tok", 2, most=count)
    experts = moe(config, count, config.whole("intermediate_size"), {"normalize": True})
    layers = [attention(config, rope(config, 1e6), kv_heads=8, **window(config)), experts]
    return decoder(config, norm("rms", config.number("rms_norm_eps", 1e-5), weight="w"), layers, tied=False)


def config(model: Decoder) -> Data:
    experts = first_of(model, Moe)
    fields = sizes(model) | heads(model) | feed_forward(model, Moe) | {"rms_norm_eps": eps_of(model.norm)}
    fields["sliding_window"] = window_of(layer_of(model, Attention).mask)
    return fields | {"num_local_experts": experts.experts, "num_experts_per_tok": experts.top_k}


EXPERTS = routed_experts(f"{LAYER}.block_sparse_moe", ("w1", "w3", "w2"))
TABLE = (*OUTSIDE, *ATTENTION, *NORMS, *EXPERTS)
FAMILY = Family("mixtral", "Mixtral", "MixtralForCausalLM", model, config, lambda config: TABLE)
