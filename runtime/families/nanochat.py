"""nanochat, as implemented in Transformers: norms without weights, and rotary positions with negative angles."""

from specc.compiler.architectures.decoder import Decoder
from specc.compiler.blocks.attention import Attention
from specc.runtime.families.config import Config
from specc.runtime.families.family import Data, Family
from specc.runtime.families.fields import eps_of, feed_forward, heads, layer_of, sizes, softcap_of
from specc.runtime.families.positions import rope
from specc.runtime.families.sections import attention, bias, decoder, mlp, norm, qk_norm
from specc.runtime.families.tables import ATTENTION, BLOCK, LAYER, OUTSIDE
from specc.runtime.families.tensors import same


def model(config: Config) -> Data:
    eps = config.number("rms_norm_eps", 1e-6)
    normed = {"qk_norm": qk_norm(eps, after_rope=True), **bias(config, "attention_bias")}
    layers = [attention(config, rope(config, turn="backward"), **normed), mlp(config, "relu2", gated=False)]
    section = decoder(config, norm("rms", eps), layers, tied=False)
    section["embed"].append({"kind": "norm"} | ({"eps": eps} if eps != 1e-6 else {}))
    if config.value("final_logit_softcapping", 15.0) is not None:
        section["head"]["softcap"] = config.number("final_logit_softcapping", 15.0)
    return section


def config(model: Decoder) -> Data:
    fields = sizes(model) | heads(model) | feed_forward(model, gated=False) | {"rms_norm_eps": eps_of(model.norm)}
    more = {"attention_bias": bool(layer_of(model, Attention).bias)}
    return fields | more | {"final_logit_softcapping": softcap_of(model)}


PLAIN = (same(f"{BLOCK}.mlp.up", f"{LAYER}.mlp.fc1.weight"), same(f"{BLOCK}.mlp.down", f"{LAYER}.mlp.fc2.weight"))
TABLE = (*OUTSIDE, *ATTENTION, *PLAIN)
FAMILY = Family("nanochat", "nanochat", "NanoChatForCausalLM", model, config, lambda config: TABLE)
