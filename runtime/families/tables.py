"""Mappings between parameters and tensors. Several families use these mappings."""

from collections.abc import Sequence

from specc.runtime.families.tensors import TensorMapping, experts, same, with_biases

LAYER = "model.layers.{i}"
BLOCK = "blocks.{i}"
OUTSIDE = (
    same("embed.token", "model.embed_tokens.weight"),
    same("norm_weight", "model.norm.weight"),
    same("head.logits", "lm_head.weight"),
)
ATTENTION = with_biases(
    [
        same(f"{BLOCK}.attention.{ours}", f"{LAYER}.self_attn.{theirs}_proj.weight")
        for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o"))
    ]
)
DENSE = with_biases(
    [same(f"{BLOCK}.mlp.{name}", f"{LAYER}.mlp.{name}_proj.weight", dims=2) for name in ("gate", "up", "down")]
)
NORMS = (
    same(f"{BLOCK}.attention.norm_weight", f"{LAYER}.input_layernorm.weight"),
    same(f"{BLOCK}.mlp.norm_weight", f"{LAYER}.post_attention_layernorm.weight"),
)
QK_NORMS = tuple(
    same(f"{BLOCK}.attention.{name}_norm_weight", f"{LAYER}.self_attn.{name}_norm.weight") for name in ("q", "k")
)
LLAMA: tuple[TensorMapping, ...] = (*OUTSIDE, *ATTENTION, *DENSE, *NORMS)
ROTARY_BUFFERS = ("model.layers.*.self_attn.rotary_emb.inv_freq",)


def routed_experts(place: str, names: Sequence[str]) -> tuple[TensorMapping, ...]:
    """Returns the mappings of a router and its experts.

    Args:
        place: the prefix of the names of the tensors in the file.
        names: the names of the matrices `gate`, `up` and `down` of an expert in the file.
    """
    ours = (f"{BLOCK}.mlp.{name}" for name in ("gate", "up", "down"))
    theirs = (f"{place}.experts.{{e}}.{name}.weight" for name in names)
    return same(f"{BLOCK}.mlp.router", f"{place}.gate.weight"), *map(experts, ours, theirs)
