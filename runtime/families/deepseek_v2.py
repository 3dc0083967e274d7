"""DeepSeek-V2 (DeepSeek-AI, 2024): latent attention, and layers of routed and shared experts."""

from collections.abc import Sequence

from specc.compiler.architectures.decoder import Decoder
from specc.compiler.blocks.latent import Latent
from specc.compiler.blocks.mlp import Mlp
from specc.compiler.blocks.moe import Moe
from specc.compiler.blocks.rope import Yarn
from specc.compiler.programs.init import value_of
from specc.runtime.families.config import Config
from specc.runtime.families.family import Data, Family, NotOfFamily
from specc.runtime.families.fields import eps_of, feed_forward, first_of, layer_of, sizes
from specc.runtime.families.positions import rope, rope_parameters
from specc.runtime.families.qwen3_moe import EXPERTS
from specc.runtime.families.sections import decoder, mlp, moe, norm, require_divisor
from specc.runtime.families.tables import BLOCK, DENSE, LAYER, OUTSIDE
from specc.runtime.families.tensors import TensorMapping, joint_heads, joint_rows, same

SELF = f"{LAYER}.self_attn"
NO_GROUPS = "specc does not support routers that select groups of experts"


def model(config: Config) -> Data:
    require_divisor(config)
    latent = _latent(config)
    number = config.whole("n_routed_experts", 64, most=32768)
    config.fixed("topk_method", ("greedy", None), NO_GROUPS)
    config.fixed("scoring_func", ("softmax",), "other scores of experts exist only in DeepSeek-V3")
    config.fixed("norm_topk_prob", (False, None), "remove the field: Transformers ignores it in DeepSeek-V2")
    config.fixed("moe_layer_freq", (1,), "specc does not support experts in every n-th layer of DeepSeek-V2")
    # Fields that follow from other fields, or that this routing method does not use
    for name in ("n_group", "topk_group", "head_dim", "qk_head_dim"):
        config.value(name)
    factor = config.number("routed_scaling_factor", 1.0)
    shared = config.whole("n_shared_experts", 2, least=0, most=1024)
    more = {"shared_experts": shared} if shared else {}
    router: Data = {"scale": factor} if factor != 1 else {}
    experts = moe(config, number, config.whole("moe_intermediate_size", 1407), router, **more)
    count, first = config.whole("num_hidden_layers", most=1000), config.whole("first_k_dense_replace", 0, least=0)
    if first >= count:
        raise config.error("first_k_dense_replace", "no layer has experts", f"use a number below {count}")
    config.fixed("mlp_bias", (False,), "specc has no biases of experts")
    dense = {"changes": [{"where": f"layer < {first}", "mlp": mlp(config)}]} if first else {}
    config.value("intermediate_size")
    eps = config.number("rms_norm_eps", 1e-6)
    return decoder(config, norm("rms", eps, weight="w"), [latent, experts], False, **dense)


def _latent(config: Config) -> Data:
    heads, dim = config.whole("num_attention_heads"), config.whole("hidden_size")
    if config.whole("num_key_value_heads", heads) != heads:
        raise config.error("num_key_value_heads", f"it is not the number of heads, {heads}", "use that number")
    config.fixed("attention_bias", (False,), "specc does not know the tensor names of biases of latent attention")
    keys, rotated = config.whole("qk_nope_head_dim", 128), config.whole("qk_rope_head_dim", 64)
    values = config.whole("v_head_dim", 128)
    turned, scale = rope(config, pairs="neighbors"), {}
    scaling = config.inner("rope_parameters") or config.inner("rope_scaling")
    everywhere = scaling.number("mscale_all_dim", 0.0, -1.0) if scaling is not None else 0.0
    if everywhere and isinstance(turned.get("scaling"), dict):
        magnitude = f"(0.1 * {everywhere:g} * log({turned['scaling']['factor']:g}) + 1)"
        scale = {"scale": f"{magnitude} ** 2 / sqrt({keys + rotated})"}
    ranks = {"kv_rank": config.whole("kv_lora_rank", 512)}
    if "q_lora_rank" not in config.fields or config.stated("q_lora_rank"):
        ranks["q_rank"] = config.whole("q_lora_rank", 1536)
    sizes = {"head_dim": keys} if keys * heads != dim else {}
    sizes |= {"rope_dim": rotated} | ({"v_dim": values} if values != keys else {})
    return {"kind": "latent", "heads": heads, **ranks, **sizes, **scale, "rope": turned}


def config(model: Decoder) -> Data:
    latent, experts = layer_of(model, Latent), first_of(model, Moe)
    kinds = [{type(layer) for layer in model.blocks.every[i].layers} for i in range(model.blocks.count)]
    dense = [i for i, kind in enumerate(kinds) if Moe not in kind]
    fields = sizes(model) | feed_forward(model, Moe)
    fields |= {"moe_intermediate_size": fields["intermediate_size"], "first_k_dense_replace": len(dense)}
    fields |= feed_forward(model, Mlp) if dense else {}
    keys = latent.head_dim or model.dim // latent.heads
    return fields | {
        "rms_norm_eps": eps_of(model.norm),
        "num_attention_heads": latent.heads,
        "num_key_value_heads": latent.heads,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank,
        "qk_nope_head_dim": keys,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.v_dim or keys,
        "n_routed_experts": experts.experts,
        "n_shared_experts": experts.shared_experts,
        "num_experts_per_tok": experts.top_k,
        "routed_scaling_factor": experts.router.scale,
        "rope_parameters": rope_parameters(latent.rope) | _scale(latent, keys + latent.rope_dim, model.blocks.count),
    }


def _scale(latent: Latent, size: int, layers: int) -> Data:
    scaling = latent.rope.scaling
    if latent.scale is None or not isinstance(scaling, Yarn):
        return {}
    from math import log, sqrt

    scale = value_of(latent.scale, head_dim=float(size), layer=0.0, layers=float(layers))
    if scaling.factor == 1 or scale <= 0:
        raise NotOfFamily("the scale of the attention scores does not follow from the YaRN factor")
    everywhere = (sqrt(scale * sqrt(size)) - 1) / (0.1 * log(scaling.factor))
    return {"mscale_all_dim": float(f"{everywhere:.12g}")}


def table(config: Config) -> Sequence[TensorMapping]:
    keys, rotated = config.whole("qk_nope_head_dim", 128), config.whole("qk_rope_head_dim", 64)
    values, heads = config.whole("v_head_dim", 128), config.whole("num_attention_heads")
    whole = "q_lora_rank" in config.fields and not config.stated("q_lora_rank")
    queries, latent = f"{SELF}.{'q_proj' if whole else 'q_b_proj'}.weight", f"{BLOCK}.latent"
    ranks = (config.whole("kv_lora_rank", 512), rotated)
    return (
        *OUTSIDE,
        joint_heads((f"{latent}.q", f"{latent}.q_rope"), queries, heads, (keys, rotated)),
        same(f"{latent}.q_down", f"{SELF}.q_a_proj.weight"),
        same(f"{latent}.q_norm_weight", f"{SELF}.q_a_layernorm.weight"),
        joint_rows((f"{latent}.kv_down", f"{latent}.k_rope"), f"{SELF}.kv_a_proj_with_mqa.weight", ranks),
        same(f"{latent}.kv_norm_weight", f"{SELF}.kv_a_layernorm.weight"),
        joint_heads((f"{latent}.k", f"{latent}.v"), f"{SELF}.kv_b_proj.weight", heads, (keys, values)),
        same(f"{latent}.out", f"{SELF}.o_proj.weight"),
        same(f"{latent}.norm_weight", f"{LAYER}.input_layernorm.weight"),
        same(f"{BLOCK}.mlp.norm_weight", f"{LAYER}.post_attention_layernorm.weight"),
        *DENSE,
        *EXPERTS,
        *(
            same(f"{BLOCK}.mlp.shared.{name}", f"{LAYER}.mlp.shared_experts.{name}_proj.weight")
            for name in ("gate", "up", "down")
        ),
    )


FAMILY = Family("deepseek_v2", "DeepSeek-V2", "DeepseekV2ForCausalLM", model, config, table)
