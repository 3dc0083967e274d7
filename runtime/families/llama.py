"""Llama 1 to 3, and models with the same architecture (Touvron et al., 2023; Grattafiori et al., 2024)."""

from specc.compiler.architectures.decoder import Decoder
from specc.compiler.blocks.attention import Attention
from specc.compiler.blocks.mlp import Mlp
from specc.runtime.families.config import Config
from specc.runtime.families.family import Data, Family
from specc.runtime.families.fields import eps_of, feed_forward, heads, layer_of, sizes
from specc.runtime.families.positions import rope
from specc.runtime.families.sections import attention, bias, decoder, mlp, norm, require_divisor
from specc.runtime.families.tables import LLAMA, ROTARY_BUFFERS


def model(config: Config) -> Data:
    require_divisor(config)
    layers = [
        attention(config, rope(config), **bias(config, "attention_bias")),
        mlp(config, **bias(config, "mlp_bias")),
    ]
    return decoder(config, norm("rms", config.number("rms_norm_eps", 1e-6), weight="w"), layers, tied=False)


def config(model: Decoder) -> Data:
    biases = {"attention_bias": bool(layer_of(model, Attention).bias), "mlp_bias": bool(layer_of(model, Mlp).bias)}
    return sizes(model) | heads(model) | feed_forward(model) | {"rms_norm_eps": eps_of(model.norm), **biases}


FAMILY = Family("llama", "Llama", "LlamaForCausalLM", model, config, lambda config: LLAMA, ROTARY_BUFFERS)
