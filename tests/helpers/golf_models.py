"""Specs of small parameter-golf models with each option, beside their descriptions for plain_golf.py."""

from dataclasses import replace
from typing import Any

from plain_golf import Plain
from tiny_models import tiny

FULL = Plain()
OPTIONS = {
    "full": FULL,
    "no_partial_rope_rule": replace(FULL, trained=None),
    "trained_on_all": replace(FULL, trained=20),
    "no_ln_scale": replace(FULL, ln_scale=False),
    "no_skips": replace(FULL, skips=""),
    "gated_skips": replace(FULL, skips="lerp"),
    "no_x0": replace(FULL, x0=False),
    "no_xsa": replace(FULL, xsa=()),
    "xsa_last": replace(FULL, xsa=(3, 4)),
    "no_smear": replace(FULL, smear=""),
    "smear_bos": replace(FULL, smear_bos=1),
    "smear_by_token": replace(FULL, smear="token"),
    "smear_by_token_bos": replace(FULL, smear="token", smear_bos=1),
    "no_bigram": replace(FULL, bigram=False),
    "no_values": replace(FULL, values=()),
    "values_in_skipping_blocks": replace(FULL, values=(2, 3)),
    "no_gain": replace(FULL, gain=None),
    "cap_15": replace(FULL, cap=15.0),
    "gate_double": replace(FULL, gate="double"),
    "gate_dense": replace(FULL, gate="dense"),
    "gate_sparse": replace(FULL, gate="sparse"),
    "parallel": replace(FULL, parallel=(3, 4)),
    "loop": replace(FULL, order=(0, 1, 2, 1, 2, 3, 4)),
    "loop_three_times_gated": replace(FULL, order=(0, 1, 2, 1, 2, 1, 2, 3, 4), skips="lerp", parallel=(3, 4)),
    "loop_without_skips": replace(FULL, order=(0, 1, 2, 3, 3, 4), skips=""),
    "late_stack": replace(
        FULL, bigram=False, smear="token", smear_bos=1, values=(), skips="lerp", gate="sparse", parallel=(4,)
    ),
    "documents": replace(FULL, documents=True),
    "documents_late_stack": replace(
        FULL, documents=True, smear="token", skips="lerp", gate="sparse", order=(0, 1, 0, 1, 2, 3, 4), lanes=3
    ),
    "lanes": replace(FULL, lanes=3),
    "lanes_of_the_last": replace(FULL, lanes=4, skips="lerp", values=()),
    "lanes_without_mix": replace(FULL, lanes=1, skips="", x0=False, values=(), xsa=()),
    "lanes_behind_a_loop": replace(FULL, order=(0, 1, 0, 1, 0, 1, 2, 3, 4), lanes=3, skips="lerp"),
    "even": replace(FULL, count=4, xsa=(0, 1, 2, 3), values=(2,)),
    "nothing": Plain(
        trained=None, gain=None, ln_scale=False, skips="", x0=False, xsa=(), smear="", bigram=False, values=()
    ),
}
GATES: dict[str, dict[str, Any]] = {
    "double": {"features": 3},
    "dense": {"act": "sigmoid(x)", "init": {"normal": 0.005}},
    "sparse": {"features": 3, "act": "sigmoid(x)"},
}
FUSE = (
    {"blocks.*.attention": ["q.norm", "q.rope", "q.gain"]},
    {"blocks.*.attention": ["k.norm", "k.rope"]},
    {"blocks.*.mlp": ["up", "act", "down"]},
    {"head": ["logits", "softcap", "loss"]},
)


def spec_of(p: Plain) -> Any:
    """The spec of the same model."""
    smear = {"lerp": {"kind": "smear"}, "token": {"kind": "smear_by_token", "features": 3}}.get(p.smear)
    bos = {"bos": p.smear_bos} if p.smear_bos is not None else {}
    pairs: dict[str, Any] = {"kind": "bigram", "buckets": p.buckets, "dim": p.pair_dim}
    if p.documents:
        bos = {"bos": p.bos}
        pairs |= bos
    embed: list[dict[str, Any]] = [{"kind": "token"}]
    embed += [pairs] if p.bigram else []
    embed += [{**smear, **bos}] if smear and p.smear == "token" else []
    embed += [{"kind": "norm"}]
    embed += [{**smear, **bos}] if smear and p.smear == "lerp" else []
    rope: dict[str, Any] = {"dims": p.rotated}
    attention: dict[str, Any] = {"kind": "attention", "heads": p.heads, "kv_heads": p.kv_heads, "residual": "learned"}
    attention["rope"] = rope | ({"trained": p.trained} if p.trained is not None else {})
    attention["qk_norm"] = {} if p.gain is None else {"gain": p.gain}
    if p.values:
        attention["values"] = {"dim": p.value_dim, "layers": list(p.values)}
    if p.xsa:
        attention["exclude"] = {} if len(p.xsa) == p.count else {"layers": list(p.xsa)}
    if p.documents:
        attention["bos"] = p.bos
    if p.gate:
        attention["gate"] = GATES[p.gate]
    mlp = {"kind": "mlp", "hidden": p.hidden, "act": "leaky_relu(x, 0.5) ** 2", "residual": "learned"}
    blocks: dict[str, Any] = {"norm": {"kind": "rms", **({"scale": "1/sqrt(layer + 1)"} if p.ln_scale else {})}}
    if p.skips:
        blocks["skips"] = {"kind": "unet", "gated": p.skips == "lerp"}
    blocks |= {"mix": {"kind": "embedded"}} if p.x0 else {}
    blocks |= {"parallel": list(p.parallel)} if p.parallel else {}
    blocks |= {"lanes": {"first": p.lanes}} if p.lanes is not None else {}
    if again := [layer for layer in range(p.count) if p.order.count(layer) > 1]:
        blocks["loop"] = {"first": again[0], "last": again[-1], "passes": p.order.count(again[0])}
    q = ["q.norm", "q.rope", *(["q.gain"] if p.gain is not None else [])]
    return tiny(
        layers=(attention, mlp),
        blocks=blocks,
        count=p.count,
        embed=embed,
        head={"softcap": p.cap},
        vocab=p.vocab,
        dim=p.dim,
        context=p.context,
        fuse=({"blocks.*.attention": q}, *FUSE[1:]),
    )
