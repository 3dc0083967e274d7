"""Published decoders without a committed spec: a config of `transformers`, the spec that says it, a table of names.

Each model has 4 layers of 64 features, 4 heads of 16 channels, 50 tokens, and windows of 9.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from families_of_llama import LAYER
from family import CONTEXT, Row, Table
from torch import Tensor

SELF = f"{LAYER}.self_attn"
VOCABULARY = 50
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
WINDOW = "j <= i and i - j < 9"
RMS = "{kind: rms, weight: w, eps: 0.00001}"
SWIGLU = "{kind: mlp, hidden: 80, act: silu(gate) * x}"
PARALLEL = "x + attention + mlp"


@dataclass(frozen=True)
class Decoder:
    """One decoder.

    Attributes:
        config: the class of the config.
        model: the `model` section of the spec, without its sizes, as YAML.
        table: parameters of ours, with `{i}` for the block, to parameters of theirs.
        fields: the fields of the config that differ from SIZES; None for those that the config does not have.
        attention: the implementation of attention of theirs.
    """

    config: str
    model: str
    table: Table
    fields: Mapping[str, Any]
    attention: str = "eager"

    def source(self, name: str, theirs: Mapping[str, Tensor]) -> tuple[str, Tensor]:
        """The parameter of theirs that has a parameter of ours, and its part."""
        layer, rest = name.split(".", 2)[1:] if name.startswith("blocks.") else ("", name)
        row = self.table.get(rest)
        if row is None or _name(row, layer) not in theirs:
            row = NAMES[rest]
        tensor = theirs[_name(row, layer)]
        return _name(row, layer), tensor if isinstance(row, str) else row[1](tensor, None)


def _name(row: Row, layer: str) -> str:
    return (row if isinstance(row, str) else row[0]).format(i=layer)


def model(attention: str, mlp: str = SWIGLU, norm: str = RMS, last: str = "", head: str = "", **keys: str) -> str:
    """A `model` section with attention and one more layer in a block. `keys` are more keys of `blocks`, and `embed`."""
    embed = ", ".join(filter(None, ("{kind: token}", keys.pop("embed", ""))))
    blocks = "".join(f", {key}: {value}" for key, value in keys.items())
    layers = f"[{{kind: attention, heads: 4, {attention}}}, {mlp}]"
    return f"""
dim: 64
embed: [{embed}]
blocks: {{count: 4, norm: {norm}, layers: {layers}{blocks}}}
norm: {last or norm}
head: {{{head or "tied: false"}}}
"""


def rows(first: int, last: int) -> Callable[[Tensor, Any], Tensor]:
    return lambda tensor, _: tensor[first:last]


def every(start: int, turned: bool) -> Callable[[Tensor, Any], Tensor]:
    """Every other column, from `start`."""
    return lambda tensor, _: tensor[..., start::2].mT if turned else tensor[..., start::2]


def split(first: int, last: int, heads: int = 4) -> Callable[[Tensor, Any], Tensor]:
    """The rows of every head from one to another."""
    return lambda tensor, _: tensor.unflatten(0, (heads, -1))[:, first:last].flatten(0, 1)


def turned(tensor: Tensor, _: Any) -> Tensor:
    return tensor.unflatten(0, (4, -1)).mT


def half(index: int) -> Callable[[Tensor, Any], Tensor]:
    return lambda tensor, _: tensor.chunk(2, 1)[index]


def fused(name: str, *sizes: int) -> dict[str, Row]:
    """q, k and v as rows of one matrix."""
    ends = [sum(sizes[: i + 1]) for i in range(3)]
    return {
        f"attention.{part}": (name, rows(end - size, end)) for part, size, end in zip("qkv", sizes, ends, strict=True)
    }


def named(**names: str) -> dict[str, Row]:
    """Rows for weights and biases. `a__b` stands for a.b; norms have a prefix for both."""
    table: dict[str, Row] = {}
    for ours, theirs in names.items():
        key = ours.replace("__", ".")
        table |= {f"{key}_weight" if "norm" in key else key: f"{theirs}.weight", f"{key}_bias": f"{theirs}.bias"}
    return table


NAMES: Table = {
    **named(
        norm="model.norm",
        head__logits="lm_head",
        attention__norm=f"{LAYER}.input_layernorm",
        mlp__norm=f"{LAYER}.post_attention_layernorm",
        **{f"attention__{part}": f"{SELF}.{part[0]}_proj" for part in ("q", "k", "v", "out")},
        **{f"mlp__{part}": f"{LAYER}.mlp.{part}_proj" for part in ("up", "gate", "down")},
        **{f"attention__{part}_norm": f"{SELF}.{part}_norm" for part in "qk"},
    ),
    "embed.token": "model.embed_tokens.weight",
    "attention.after_weight": f"{LAYER}.post_attention_layernorm.weight",
    "mlp.after_weight": f"{LAYER}.post_feedforward_layernorm.weight",
}
GATE_UP: Table = {
    "mlp.gate": (f"{LAYER}.mlp.gate_up_proj.weight", rows(0, 80)),
    "mlp.up": (f"{LAYER}.mlp.gate_up_proj.weight", rows(80, 160)),
}
EXPERTS: Table = {
    "mlp.router": f"{LAYER}.mlp.gate.weight",
    "mlp.gate": (f"{LAYER}.mlp.experts.gate_up_proj", half(0)),
    "mlp.up": (f"{LAYER}.mlp.experts.gate_up_proj", half(1)),
    "mlp.down": f"{LAYER}.mlp.experts.down_proj",
}
H = "transformer.h.{i}"
FALCON: Table = named(
    attention__out=f"{H}.self_attention.dense",
    mlp__up=f"{H}.mlp.dense_h_to_4h",
    mlp__down=f"{H}.mlp.dense_4h_to_h",
    attention__norm=f"{H}.input_layernorm",
    mlp__norm=f"{H}.post_attention_layernorm",
    norm="transformer.ln_f",
) | {"embed.token": "transformer.word_embeddings.weight"}
DBRX = "transformer.blocks.{i}"


def partial_rope(share: float) -> dict[str, Any]:
    return {"rope_parameters": {**SIZES["rope_parameters"], "partial_rotary_factor": share}}


TANH_MLP = "{kind: mlp, hidden: 80, bias: true, act: gelu_tanh(x)}"
experts = partial("{{kind: moe, name: mlp, top_k: {top_k}, hidden: 24, act: {act}, {more}}}".format, top_k=2)
OLD = dict.fromkeys(SIZES.keys() - {"vocab_size", "tie_word_embeddings", "bos_token_id", "eos_token_id"})
DECODERS: Mapping[str, Decoder] = {
    "phi3": Decoder(
        "Phi3Config",
        model(f"kv_heads: 2, rope: {{dims: 12}}, mask: {WINDOW}"),
        {**fused(f"{SELF}.qkv_proj.weight", 64, 32, 32), **GATE_UP},
        {"sliding_window": 9, **partial_rope(0.75)},
    ),
    "falcon": Decoder(
        "FalconConfig",
        model(
            "kv_heads: 1, rope: {}",
            "{kind: mlp, hidden: 80, act: gelu(x)}",
            "{kind: layer, shared: true}",
            "{kind: layer}",
            "tied: true",
            write=PARALLEL,
        ),
        {**FALCON, **fused(f"{H}.self_attention.query_key_value.weight", 64, 16, 16)},
        {"num_key_value_heads": None, "ffn_hidden_size": 80, "tie_word_embeddings": True},
    ),
    "falcon_rw": Decoder(  # eager attention of theirs adds the slopes twice
        "FalconConfig",
        model(
            "bias: true, score: s - slope(h) * (i - j) / sqrt(16)",
            "{kind: mlp, hidden: 80, bias: true, act: gelu(x)}",
            "{kind: layer}",
            head="tied: true",
        ),
        FALCON
        | {
            f"attention.{part}{end}": (
                f"{H}.self_attention.query_key_value.{theirs}",
                split(16 * i, 16 * i + 16),
            )
            for i, part in enumerate("qkv")
            for end, theirs in (("", "weight"), ("_bias", "bias"))
        },
        {"multi_query": False, "alibi": True, "parallel_attn": False, "bias": True, "ffn_hidden_size": 80}
        | {"num_key_value_heads": None, "tie_word_embeddings": True},
        "sdpa",
    ),
    "gptj": Decoder(
        "GPTJConfig",
        model(
            "rope: {dims: 8, pairs: neighbors}",
            TANH_MLP,
            "{kind: layer, shared: true}",
            "{kind: layer}",
            "tied: false, bias: true",
            write=PARALLEL,
        ),
        named(
            **{f"attention__{part}": f"{H}.attn.{part}_proj" for part in ("q", "k", "v", "out")},
            mlp__up=f"{H}.mlp.fc_in",
            mlp__down=f"{H}.mlp.fc_out",
            attention__norm=f"{H}.ln_1",
            norm="transformer.ln_f",
        )
        | {"embed.token": "transformer.wte.weight"},
        {**OLD, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_inner": 80, "rotary_dim": 8, "n_positions": CONTEXT},
    ),
    "gpt_neo": Decoder(
        "GPTNeoConfig",
        model(
            "bias: [out], scale: 1",
            TANH_MLP,
            "{kind: layer}",
            head="tied: true",
            embed="{kind: positions}",
            changes=f"[{{where: layer % 2 == 1, attention: {{mask: {WINDOW}}}}}]",
        ),
        named(
            **{f"attention__{part}": f"{H}.attn.attention.{part}_proj" for part in ("q", "k", "v", "out")},
            mlp__up=f"{H}.mlp.c_fc",
            mlp__down=f"{H}.mlp.c_proj",
            attention__norm=f"{H}.ln_1",
            mlp__norm=f"{H}.ln_2",
            norm="transformer.ln_f",
        )
        | {"embed.token": "transformer.wte.weight", "embed.positions": "transformer.wpe.weight"},
        {**OLD, "hidden_size": 64, "intermediate_size": 80, "max_position_embeddings": CONTEXT}
        | {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 9}
        | {"tie_word_embeddings": True},
    ),
    "granite": Decoder(
        "GraniteConfig",
        model(
            "kv_heads: 2, rope: {}, scale: 0.0625, write: x + 0.22 * y",
            SWIGLU[:-1] + ", write: x + 0.22 * y}",
            head="tied: false, softcap: z / 8",
            embed="{kind: scale, by: 12}",
        ),
        {},
        {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
        | {"attention_multiplier": 0.0625},
    ),
    "smollm3": Decoder(
        "SmolLM3Config",
        model("kv_heads: 2, rope: {}", changes="[{where: layer % 4 == 3, attention: {rope: null}}]"),
        {},
        {},
    ),
    "cohere2": Decoder(
        "Cohere2Config",
        model(
            f"kv_heads: 2, rope: {{pairs: neighbors}}, mask: {WINDOW}",
            norm="{kind: layer, bias: false, shared: true}",
            last="{kind: layer, bias: false}",
            head="tied: true, softcap: z * 0.25",
            write=PARALLEL,
            changes="[{where: layer % 4 == 3, attention: {rope: null, mask: j <= i}}]",
        ),
        {},
        {"sliding_window": 9, "logit_scale": 0.25, "tie_word_embeddings": True, "rms_norm_eps": None},
    ),
    "gemma2": Decoder(
        "Gemma2Config",
        model(
            f"kv_heads: 2, head_dim: 24, rope: {{}}, scale: 1/sqrt(20), score: 5 * tanh(s / 5), mask: {WINDOW}",
            "{kind: mlp, hidden: 80, act: gelu_tanh(gate) * x}",
            "{kind: rms, weight: 1 + w, eps: 0.00001, places: [before, after]}",
            "{kind: rms, weight: 1 + w, eps: 0.00001}",
            "tied: true, softcap: 3",
            embed="{kind: scale, by: sqrt(dim)}",
            changes="[{where: layer % 2 == 1, attention: {mask: j <= i}}]",
        ),
        {"mlp.norm_weight": f"{LAYER}.pre_feedforward_layernorm.weight"},
        {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 9, "tie_word_embeddings": True}
        | {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0},
    ),
    "nemotron": Decoder(
        "NemotronConfig",
        model(
            "kv_heads: 2, rope: {dims: 8}",
            "{kind: mlp, hidden: 80, act: relu(x) ** 2}",
            "{kind: layer, weight: 1 + w}",
        ),
        {},
        {"rms_norm_eps": None, **partial_rope(0.5)},
    ),
    "glm4": Decoder(
        "Glm4Config",
        model(
            "kv_heads: 2, bias: [q, k, v], rope: {dims: 8, pairs: neighbors}",
            norm=RMS[:-1] + ", places: [before, after]}",
            last=RMS,
        ),
        {**GATE_UP, "attention.after_weight": f"{LAYER}.post_self_attn_layernorm.weight"}
        | {"mlp.after_weight": f"{LAYER}.post_mlp_layernorm.weight"},
        {"head_dim": 16, "attention_bias": True, **partial_rope(0.5)},
    ),
    "exaone4": Decoder(
        "Exaone4Config",
        model(
            f"kv_heads: 2, rope: {{}}, qk_norm: {{weight: w, eps: 0.00001}}, mask: {WINDOW}",
            norm=RMS[:-1] + ", places: [after]}",
            last=RMS,
            changes="[{where: layer % 4 == 3, attention: {rope: null, mask: j <= i}}]",
        ),
        {},
        {"sliding_window": 9, "sliding_window_pattern": 4},
    ),
    "hunyuan_v1_dense": Decoder(
        "HunYuanDenseV1Config",
        model("kv_heads: 2, rope: {}, qk_norm: {weight: w, eps: 0.00001, after_rope: true}"),
        {"attention.q_norm_weight": f"{SELF}.query_layernorm.weight"}
        | {"attention.k_norm_weight": f"{SELF}.key_layernorm.weight"},
        {"head_dim": 16},
    ),
    "dbrx": Decoder(
        "DbrxConfig",
        model(
            "kv_heads: 2, rope: {}, q: 'min(max(q, -2), 2)', k: 'min(max(k, -2), 2)', v: 'min(max(v, -2), 2)'",
            experts(act="silu(gate) * x", more="experts: 4, router: {normalize: true}"),
            "{kind: layer, bias: false}",
        ),
        named(
            attention__out=f"{DBRX}.norm_attn_norm.attn.out_proj",
            attention__norm=f"{DBRX}.norm_attn_norm.norm_1",
            mlp__norm=f"{DBRX}.norm_attn_norm.norm_2",
            norm="transformer.norm_f",
            mlp__router=f"{DBRX}.ffn.router.layer",
        )
        | fused(f"{DBRX}.norm_attn_norm.attn.Wqkv.weight", 64, 32, 32)
        | {"embed.token": "transformer.wte.weight"}
        | {"mlp.gate": f"{DBRX}.ffn.experts.mlp.w1", "mlp.up": f"{DBRX}.ffn.experts.mlp.v1"}
        | {"mlp.down": (f"{DBRX}.ffn.experts.mlp.w2", turned)},
        {**OLD, "d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": CONTEXT}
        | {"rope_parameters": SIZES["rope_parameters"]}
        | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4}}
        | {"ffn_config": {"hidden_size": 64, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}},
    ),
    "qwen2_moe": Decoder(
        "Qwen2MoeConfig",
        f"""
dim: 64
embed: [{{kind: token}}]
blocks:
  count: 4
  norm: {{kind: rms, weight: w, eps: 0.00001, shared: true}}
  layers:
    - {{kind: attention, heads: 4, kv_heads: 2, bias: [q, k, v], rope: {{}}}}
    - {experts(act="silu(gate) * x", more="experts: 4, read: x + attention")}
    - kind: mlp
      name: shared
      hidden: 40
      act: silu(gate) * x
      read: x + attention
      learn: {{open: {{of: h, shape: 1}}}}
  write: x + attention + mlp + sigmoid(shared.open) * shared
norm: {RMS}
head: {{tied: false}}
""",
        {
            **EXPERTS,
            **{f"shared.{part}": f"{LAYER}.mlp.shared_expert.{part}_proj.weight" for part in ("up", "gate", "down")},
            "shared.open": f"{LAYER}.mlp.shared_expert_gate.weight",
        },
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 40},
    ),
    "deepseek_v3": Decoder(
        "DeepseekV3Config",
        f"""
dim: 64
embed: [{{kind: token}}]
blocks:
  count: 4
  norm: {RMS}
  layers:
    - kind: latent
      heads: 4
      kv_rank: 24
      q_rank: 20
      head_dim: 16
      rope_dim: 8
      v_dim: 12
      rope: {{pairs: neighbors}}
    - kind: moe
      name: mlp
      experts: 8
      shared_experts: 1
      top_k: 3
      hidden: 24
      act: silu(gate) * x
      router: {{score: sigmoid, bias: true, normalize: true, scale: 2.5, groups: 4, top_groups: 2}}
  changes: [{{where: layer < 1, mlp: {SWIGLU}}}]
norm: {RMS}
head: {{tied: false}}
""",
        {
            **EXPERTS,
            "mlp.router_bias": f"{LAYER}.mlp.gate.e_score_correction_bias",
            **{f"mlp.shared.{p}": f"{LAYER}.mlp.shared_experts.{p}_proj.weight" for p in ("up", "gate", "down")},
            "latent.q_down": f"{SELF}.q_a_proj.weight",
            "latent.q_norm_weight": f"{SELF}.q_a_layernorm.weight",
            "latent.q": (f"{SELF}.q_b_proj.weight", split(0, 16)),
            "latent.q_rope": (f"{SELF}.q_b_proj.weight", split(16, 24)),
            "latent.kv_down": (f"{SELF}.kv_a_proj_with_mqa.weight", rows(0, 24)),
            "latent.k_rope": (f"{SELF}.kv_a_proj_with_mqa.weight", rows(24, 32)),
            "latent.kv_norm_weight": f"{SELF}.kv_a_layernorm.weight",
            "latent.k": (f"{SELF}.kv_b_proj.weight", split(0, 16)),
            "latent.v": (f"{SELF}.kv_b_proj.weight", split(16, 28)),
            "latent.out": f"{SELF}.o_proj.weight",
            "latent.norm_weight": f"{LAYER}.input_layernorm.weight",
        },
        {"num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8, "v_head_dim": 12}
        | {"qk_nope_head_dim": 16, "n_group": 4, "topk_group": 2, "n_routed_experts": 8, "num_experts_per_tok": 3}
        | {"first_k_dense_replace": 1, "moe_intermediate_size": 24, "n_shared_experts": 1, "num_mtp_layers": 0},
    ),
    "gpt_oss": Decoder(
        "GptOssConfig",
        model(
            "kv_heads: 2, bias: true, sinks: true, rope: {scaling: {kind: yarn, factor: 4, trained: 16, whole: false}}"
            f", mask: {WINDOW}",
            experts(
                act="'(min(max(x, -7), 7) + 1) * min(gate, 7) * sigmoid(1.702 * min(gate, 7))'",
                more="experts: 4, bias: true, router: {normalize: true}",
            ),
            changes="[{where: layer % 2 == 1, attention: {mask: j <= i}}]",
        ),
        {
            "attention.sinks": f"{SELF}.sinks",
            "mlp.router": f"{LAYER}.mlp.router.weight",
            "mlp.logits_bias": f"{LAYER}.mlp.router.bias",
            "mlp.gate": (f"{LAYER}.mlp.experts.gate_up_proj", every(0, turned=True)),
            "mlp.up": (f"{LAYER}.mlp.experts.gate_up_proj", every(1, turned=True)),
            "mlp.gate_bias": (f"{LAYER}.mlp.experts.gate_up_proj_bias", every(0, turned=False)),
            "mlp.up_bias": (f"{LAYER}.mlp.experts.gate_up_proj_bias", every(1, turned=False)),
            "mlp.down": (f"{LAYER}.mlp.experts.down_proj", lambda tensor, _: tensor.mT),
            "mlp.down_bias": f"{LAYER}.mlp.experts.down_proj_bias",
        },
        {"head_dim": 16, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"intermediate_size": 24}
        | {
            "rope_parameters": {**SIZES["rope_parameters"], "rope_type": "yarn", "factor": 4.0, "truncate": False}
            | {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 16}
        },
    ),
}
