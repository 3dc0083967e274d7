"""Qwen3-MoE: Qwen3 with experts in some or all layers."""

from specc.compiler.architectures.decoder import Decoder
from specc.compiler.blocks.attention import Attention
from specc.compiler.blocks.mlp import Mlp
from specc.compiler.blocks.moe import Moe
from specc.runtime.families.conditions import where
from specc.runtime.families.config import Config
from specc.runtime.families.family import Data, Family
from specc.runtime.families.fields import eps_of, feed_forward, first_of, heads, layer_of, sizes, window_of
from specc.runtime.families.positions import rope
from specc.runtime.families.sections import attention, bias, decoder, mlp, moe, norm, qk_norm, window
from specc.runtime.families.tables import LAYER, LLAMA, QK_NORMS, routed_experts


def model(config: Config) -> Data:
    eps, count = config.number("rms_norm_eps", 1e-6), config.whole("num_hidden_layers", most=1000)
    number = config.whole("num_local_experts", config.whole("num_experts", 128), most=32768)
    router = {"normalize": True} if config.flag("norm_topk_prob", False) else {}
    layer = moe(config, number, config.whole("moe_intermediate_size", 768), router)
    masked = window(config, 4096) if config.flag("use_sliding_window", False) else {}
    config.value("sliding_window"), config.value("max_window_layers")
    fields = {"qk_norm": qk_norm(eps, weight="w"), **masked, **bias(config, "attention_bias")}
    dense = _dense(config, count)
    if len(dense) == count:
        raise config.error("mlp_only_layers", "no layer has experts", "import it as qwen3")
    changes = {"changes": [{"where": where(dense, count), "mlp": mlp(config)}]} if dense else {}
    config.value("intermediate_size")
    layers = [attention(config, rope(config), kv_heads=4, **fields), layer]
    return decoder(config, norm("rms", eps, weight="w"), layers, False, **changes)


def _dense(config: Config, count: int) -> list[int]:
    listed, step = config.value("mlp_only_layers") or [], config.whole("decoder_sparse_step", 1)
    if not isinstance(listed, list) or any(type(i) is not int or not 0 <= i < count for i in listed):
        raise config.error("mlp_only_layers", f"it does not list layers from 0 to {count - 1}", "list whole numbers")
    return [i for i in range(count) if i in listed or (i + 1) % step]


def config(model: Decoder) -> Data:
    experts, every = first_of(model, Moe), range(model.blocks.count)
    kinds = [{type(layer) for layer in model.blocks.every[i].layers} for i in every]
    dense = [i for i in every if Moe not in kinds[i]]
    fields = sizes(model) | heads(model) | feed_forward(model, Moe)
    fields |= {"moe_intermediate_size": fields["intermediate_size"], "mlp_only_layers": dense}
    fields |= feed_forward(model, Mlp) if dense else {}
    layer = layer_of(model, Attention)
    size = window_of(layer.mask)
    return fields | {
        "rms_norm_eps": eps_of(model.norm),
        "num_local_experts": experts.experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.router.normalize,
        "attention_bias": bool(layer.bias),
        "use_sliding_window": size is not None,
        "sliding_window": size,
    }


EXPERTS = routed_experts(f"{LAYER}.mlp", ("gate_proj", "up_proj", "down_proj"))
FAMILY = Family(
    "qwen3_moe", "Qwen3-MoE", "Qwen3MoeForCausalLM", model, config, lambda config: (*LLAMA, *QK_NORMS, *EXPERTS)
)
