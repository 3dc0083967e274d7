"""Gemma 3, text models only (Gemma Team, 2025): local and global attention, norms before and after each layer."""

from specc.compiler.architectures.decoder import Decoder
from specc.compiler.blocks.attention import Attention
from specc.runtime.families.conditions import where
from specc.runtime.families.config import Config
from specc.runtime.families.family import Data, Family
from specc.runtime.families.fields import eps_of, feed_forward, heads, layer_of, sizes, softcap_of, window_of
from specc.runtime.families.olmo2 import AFTER
from specc.runtime.families.positions import rope, rope_parameters
from specc.runtime.families.qwen3 import layer_types
from specc.runtime.families.sections import attention, bias, decoder, mlp, norm, qk_norm, require_divisor
from specc.runtime.families.tables import ATTENTION, BLOCK, DENSE, LAYER, OUTSIDE, QK_NORMS
from specc.runtime.families.tensors import same

LOCAL, FULL = "sliding_attention", "full_attention"
BASES = {LOCAL: (1e4, "rope_local_base_freq"), FULL: (1e6, "rope_theta")}


def model(config: Config) -> Data:
    require_divisor(config)
    eps, count = config.number("rms_norm_eps", 1e-6), config.whole("num_hidden_layers", most=1000)
    every = config.whole("sliding_window_pattern", 6)
    usual = [FULL if i % every == every - 1 else LOCAL for i in range(count)]
    kinds = layer_types(config, count, (LOCAL, FULL)) or usual
    needed = "attention to later tokens needs an encoder, which specc does not import"
    config.fixed("use_bidirectional_attention", (False, None), needed)
    config.fixed("attn_logit_softcapping", (None,), "remove the field: Transformers ignores it in Gemma 3")
    masks = {LOCAL: f"j <= i and i - j < {config.whole('sliding_window', 4096)}", FULL: "j <= i"}
    turned = {kind: rope(config, base, kind, old) for kind, (base, old) in BASES.items()}
    first = LOCAL if LOCAL in kinds else FULL
    scale, size = config.number("query_pre_attn_scalar", 256), config.whole("head_dim", 256)
    fields: Data = {"qk_norm": qk_norm(eps, weight="1 + w"), **bias(config, "attention_bias")}
    fields |= {"scale": f"1/sqrt({scale:g})"} if scale != size else {}
    fields |= {"mask": masks[first]} if first == LOCAL else {}
    layers = [attention(config, turned[first], 256, 4, **fields), mlp(config, "gelu_pytorch_tanh", "hidden_activation")]
    full = [i for i, kind in enumerate(kinds) if kind == FULL]
    more: Data = {}
    if full and first == LOCAL:
        changed = {"rope": turned[FULL], "mask": masks[FULL]}
        more["changes"] = [{"where": where(full, count), "attention": changed}]
    section = decoder(config, norm("rms", eps, weight="1 + w", places=["before", "after"]), layers, True, **more)
    section["embed"].append({"kind": "scale", "by": "sqrt(dim)"})
    if config.stated("final_logit_softcapping"):
        section["head"]["softcap"] = config.number("final_logit_softcapping")
    return section


def config(model: Decoder) -> Data:
    fields = sizes(model) | heads(model) | feed_forward(model, key="hidden_activation")
    layers = [layer_of(model, Attention, i) for i in range(model.blocks.count)]
    windows = [window_of(layer.mask) for layer in layers]
    fields |= {"rms_norm_eps": eps_of(model.norm), "layer_types": [LOCAL if size else FULL for size in windows]}
    fields["sliding_window"] = next(filter(None, windows), None) or 4096
    by_kind = dict(zip(fields["layer_types"], layers, strict=True))
    fields["rope_parameters"] = {
        kind: rope_parameters(by_kind[kind].rope) if kind in by_kind else {"rope_type": "default", "rope_theta": base}
        for kind, (base, _) in BASES.items()
    }
    fields["query_pre_attn_scalar"] = _scalar(layers[0], model.dim)
    fields["attention_bias"] = bool(layers[0].bias)
    return fields | {"final_logit_softcapping": softcap_of(model)}


def _scalar(layer: Attention, dim: int) -> float:
    text = str(layer.scale).replace(" ", "") if layer.scale is not None else ""
    number = text.removeprefix("1/sqrt(").removesuffix(")")
    size = layer.size(dim)
    return (float(number) if "." in number else int(number)) if number.replace(".", "", 1).isdigit() else size


BEFORE = (
    same(f"{BLOCK}.attention.norm_weight", f"{LAYER}.input_layernorm.weight"),
    same(f"{BLOCK}.mlp.norm_weight", f"{LAYER}.pre_feedforward_layernorm.weight"),
)
TABLE = (*OUTSIDE, *ATTENTION, *DENSE, *QK_NORMS, *BEFORE, *AFTER)
FAMILY = Family("gemma3_text", "Gemma 3", "Gemma3ForCausalLM", model, config, lambda config: TABLE)
