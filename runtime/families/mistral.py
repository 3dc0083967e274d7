"""Mistral (Jiang et al., 2023): Llama with sliding-window attention."""

from specc.compiler.architectures.decoder import Decoder
from specc.compiler.blocks.attention import Attention
from specc.runtime.families.config import Config
from specc.runtime.families.family import Data, Family
from specc.runtime.families.fields import eps_of, feed_forward, heads, layer_of, sizes, window_of
from specc.runtime.families.positions import rope
from specc.runtime.families.sections import attention, decoder, mlp, norm, window
from specc.runtime.families.tables import LLAMA, ROTARY_BUFFERS


def model(config: Config) -> Data:
    layers = [attention(config, rope(config), kv_heads=8, **window(config, 4096)), mlp(config)]
    return decoder(config, norm("rms", config.number("rms_norm_eps", 1e-6), weight="w"), layers, tied=False)


def config(model: Decoder) -> Data:
    masked = {"sliding_window": window_of(layer_of(model, Attention).mask), "rms_norm_eps": eps_of(model.norm)}
    return sizes(model) | heads(model) | feed_forward(model) | masked


FAMILY = Family("mistral", "Mistral", "MistralForCausalLM", model, config, lambda config: LLAMA, ROTARY_BUFFERS)
