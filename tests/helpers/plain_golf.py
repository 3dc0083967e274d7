"""The models of parameter-golf in plain Torch, for tests: written from their description, without the compiler.

Weights stand in modules of their own names; `copied` fills them from a generated model's parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Plain:
    """Which of the published parts a model has, and its sizes."""

    vocab: int = 40
    dim: int = 24
    context: int = 20
    count: int = 5
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 36
    rotated: int = 4
    trained: int | None = 8
    gain: float | None = 1.5
    cap: float = 30.0
    ln_scale: bool = True
    skips: str = "additive"  # or "lerp", or ""
    x0: bool = True
    xsa: tuple[int, ...] = (0, 1, 2, 3, 4)
    smear: str = "lerp"  # or "token", or ""
    smear_bos: int | None = None
    buckets: int = 16
    pair_dim: int = 6
    bigram: bool = True
    values: tuple[int, ...] = (3, 4)
    value_dim: int = 7
    gate: str = ""  # "double", "dense", "sparse"
    parallel: tuple[int, ...] = ()
    order: tuple[int, ...] = ()  # of the blocks; each once where empty
    documents: bool = False  # `bos` starts one, and nothing is read across its start
    lanes: int | None = None  # the block from which attention and the MLP have a lane each
    bos: int = 1

    @property
    def runs(self) -> tuple[int, ...]:
        return self.order or tuple(range(self.count))

    @property
    def size(self) -> int:
        return self.dim // self.heads


def rms(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def rotate(x: Tensor, dims: int, base: float) -> Tensor:
    """x [B, T, H, C]: out1 = x1 cos + x2 sin, out2 = -x1 sin + x2 cos over the first `dims`."""
    rows = []
    for t in range(x.shape[1]):
        first, second = x[:, t, :, : dims // 2], x[:, t, :, dims // 2 : dims]
        angle = t * base ** (-2 * torch.arange(dims // 2, dtype=x.dtype) / dims)
        turned = (first * angle.cos() + second * angle.sin(), -first * angle.sin() + second * angle.cos())
        rows.append(torch.cat((*turned, x[:, t, :, dims:]), -1))
    return torch.stack(rows, 1)


class PlainBlock(nn.Module):
    def __init__(self, p: Plain, layer: int) -> None:
        super().__init__()
        self.p, self.layer = p, layer
        self.document = torch.empty(0)  # the number of each token's document
        kv = p.kv_heads * p.size
        self.wq, self.wo = nn.Linear(p.dim, p.dim, bias=False), nn.Linear(p.dim, p.dim, bias=False)
        self.wk, self.wv = nn.Linear(p.dim, kv, bias=False), nn.Linear(p.dim, kv, bias=False)
        self.fc, self.proj = nn.Linear(p.dim, p.hidden, bias=False), nn.Linear(p.hidden, p.dim, bias=False)
        self.attn_scale, self.mlp_scale = nn.Parameter(torch.ones(p.dim)), nn.Parameter(torch.ones(p.dim))
        if p.gain is not None:
            self.q_gain = nn.Parameter(torch.ones(p.heads))
        if p.x0:
            self.resid_mix = nn.Parameter(torch.ones(2, p.dim))
        if layer in p.values:
            self.ve_scale = nn.Parameter(torch.ones(()))
        if p.lanes is not None and layer >= p.lanes:
            self.lane_r = nn.Parameter(torch.ones(2))
            self.lane_pa, self.lane_pm = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        if p.gate:
            self.gate = nn.Linear(p.dim if p.gate == "dense" else 3, p.heads, bias=False)

    def forward(self, x: Tensor, x0: Tensor, ve: Tensor | None) -> Tensor:
        p = self.p
        u = self.resid_mix[0] * x + self.resid_mix[1] * x0 if p.x0 else x
        s = (self.layer + 1) ** -0.5 if p.ln_scale else 1.0
        attended = self.attn_scale * self.attention(s * rms(u), ve)
        if self.layer in p.parallel:
            return u + attended + self.mlp_scale * self.mlp(s * rms(u))
        y = u + attended
        return y + self.mlp_scale * self.mlp(s * rms(y))

    def in_lanes(self, lanes: list[Tensor], x0: Tensor, ve: Tensor | None) -> list[Tensor]:
        """Both write to both lanes, and neither sees what the other writes."""
        p = self.p
        u = self.resid_mix[0] * lanes[0] + self.resid_mix[1] * x0 if p.x0 else lanes[0]
        s = (self.layer + 1) ** -0.5 if p.ln_scale else 1.0
        attended = self.attn_scale * self.attention(s * rms(u), ve)
        activated = self.mlp_scale * self.mlp(s * rms(lanes[1]))
        r, pa, pm = self.lane_r, self.lane_pa, self.lane_pm
        return [r[i] * lanes[i] + pa[i] * attended + pm[i] * activated for i in range(2)]

    def mlp(self, h: Tensor) -> Tensor:
        pre = self.fc(h)
        return self.proj(torch.where(pre > 0, pre, 0.5 * pre) ** 2)

    def attention(self, h: Tensor, ve: Tensor | None) -> Tensor:
        p, (batch, tokens, _) = self.p, h.shape
        v = self.wv(h)
        if self.layer in p.values:
            v = v + self.ve_scale * ve
        q = rms(self.wq(h).view(batch, tokens, p.heads, p.size))
        k = rms(self.wk(h).view(batch, tokens, p.kv_heads, p.size))
        v = v.view(batch, tokens, p.kv_heads, p.size)
        base = 10000.0
        if p.trained is not None and p.context > p.trained:
            base *= (p.context / p.trained) ** (p.rotated / (p.rotated - 2))
        q, k = rotate(q, p.rotated, base), rotate(k, p.rotated, base)
        if p.gain is not None:
            q = q * self.q_gain[:, None]
        heads = []
        for head in range(p.heads):
            group = head // (p.heads // p.kv_heads)
            scores = q[:, :, head] @ k[:, :, group].transpose(1, 2) / p.size**0.5
            scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), float("-inf"))
            if p.documents:
                scores = scores.masked_fill(self.document.unsqueeze(2) != self.document.unsqueeze(1), float("-inf"))
            value = v[:, :, group]
            y = scores.softmax(-1) @ value
            if self.layer in p.xsa:
                unit = value / value.norm(dim=-1, keepdim=True)
                y = y - (y * unit).sum(-1, keepdim=True) * unit
            heads.append(y)
        y = torch.stack(heads, 2)
        if p.gate:
            opened = torch.sigmoid(self.gate(h[..., : self.gate.in_features]))
            y = y * ((2 if p.gate == "double" else 1) * opened).unsqueeze(-1)
        return self.wo(y.reshape(batch, tokens, p.dim))


class PlainGolf(nn.Module):
    def __init__(self, p: Plain) -> None:
        super().__init__()
        self.p = p
        self.tok_emb = nn.Embedding(p.vocab, p.dim)
        if p.bigram:
            self.bigram, self.bigram_proj = (
                nn.Embedding(p.buckets, p.pair_dim),
                nn.Linear(p.pair_dim, p.dim, bias=False),
            )
            self.bigram_scale = nn.Parameter(torch.ones(()))
        if p.smear == "lerp":
            self.smear = nn.Parameter(torch.zeros(p.dim))
        if p.smear == "token":
            self.smear_gate, self.smear_lambda = nn.Linear(3, 1, bias=False), nn.Parameter(torch.zeros(()))
        if p.values:
            self.ve, self.ve_scale = nn.Embedding(p.vocab, p.value_dim), nn.Parameter(torch.ones(()))
            self.ve_proj = nn.Linear(p.value_dim, p.kv_heads * p.size, bias=False)
        self.blocks = nn.ModuleList(PlainBlock(p, layer) for layer in range(p.count))
        half = len(p.runs) // 2
        if p.skips:
            self.skip_weights = nn.Parameter(torch.ones(half, p.dim))
        if p.skips == "lerp":
            self.skip_gates = nn.Parameter(torch.zeros(half, p.dim))

    def bucket(self, ids: Tensor) -> Tensor:
        """Of each token, one by one."""
        result = torch.empty_like(ids)
        for row in range(ids.shape[0]):
            result[row, 0] = self.p.buckets - 1
            for t in range(1, ids.shape[1]):
                if self.p.documents and int(ids[row, t]) == self.p.bos:
                    result[row, t] = self.p.buckets - 1
                    continue
                mixed = (36313 * int(ids[row, t])) ^ (27191 * int(ids[row, t - 1]))
                result[row, t] = mixed % (self.p.buckets - 1)
        return result

    def smeared(self, x: Tensor, ids: Tensor) -> Tensor:
        p = self.p
        before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)
        mark = p.bos if p.documents else p.smear_bos
        open = torch.ones_like(ids) if mark is None else (ids != mark).long()
        if p.smear == "lerp":
            g = torch.sigmoid(self.smear)
            return (1 - g) * x + g * before * open.unsqueeze(-1)
        g = self.smear_lambda * torch.sigmoid(self.smear_gate(x[..., :3]))
        return x + g * before * open.unsqueeze(-1)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        p = self.p
        for block in self.blocks:
            block.document = (ids == p.bos).cumsum(1)
        x = self.tok_emb(ids)
        if p.bigram:
            x = x + self.bigram_scale * self.bigram_proj(self.bigram(self.bucket(ids)))
        if p.smear == "token":
            x = self.smeared(x, ids)
        x = rms(x)
        if p.smear == "lerp":
            x = self.smeared(x, ids)
        x0 = x
        ve = self.ve_scale * self.ve_proj(self.ve(ids)) if p.values else None
        half = len(p.runs) // 2
        stack: list[Tensor] = []
        lanes: list[Tensor] = []
        for run, layer in enumerate(p.runs):
            if layer == p.lanes:
                lanes = [x, x]
            if lanes:
                x = lanes[0]
            if p.skips and half <= run < 2 * half:
                skip = self.skip_weights[run - half] * stack.pop()
                if p.skips == "lerp":
                    g = torch.sigmoid(self.skip_gates[run - half])
                    x = g * x + (1 - g) * skip
                else:
                    x = x + skip
            if lanes:
                lanes = self.blocks[layer].in_lanes([x, lanes[1]], x0, ve)
                continue
            x = self.blocks[layer](x, x0, ve)
            if run < half:
                stack.append(x)
        x = (lanes[0] + lanes[1]) / 2 if lanes else x
        logits = p.cap * torch.tanh(rms(x) @ self.tok_emb.weight.T / p.cap)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


EMBEDDED = {
    "embed.token": "tok_emb.weight",
    "embed.bigram.table": "bigram.weight",
    "embed.bigram.project": "bigram_proj.weight",
    "embed.bigram.scale": "bigram_scale",
    "embed.smear.gate": "smear",
    "embed.smear_by_token.gate": "smear_gate.weight",
    "embed.smear_by_token.scale": "smear_lambda",
    "attention_values.table": "ve.weight",
    "attention_values.project": "ve_proj.weight",
    "attention_values.scale": "ve_scale",
}
BLOCK = {
    "attention.q": "wq.weight",
    "attention.k": "wk.weight",
    "attention.v": "wv.weight",
    "attention.out": "wo.weight",
    "attention.q_gain": "q_gain",
    "attention.residual": "attn_scale",
    "attention.value_scale": "ve_scale",
    "attention.head_gate": "gate.weight",
    "mlp.up": "fc.weight",
    "mlp.down": "proj.weight",
    "mlp.residual": "mlp_scale",
}


LANES = {
    "attention.carry": ("lane_r", 0),
    "mlp.carry": ("lane_r", 1),
    "attention.to_attention": ("lane_pa", 0),
    "attention.to_mlp": ("lane_pa", 1),
    "mlp.to_attention": ("lane_pm", 0),
    "mlp.to_mlp": ("lane_pm", 1),
}


@dataclass(frozen=True)
class Place:
    """Where a generated parameter stands in the plain model: in a row of a parameter, where `row` is one."""

    name: str
    row: int | None = None


def place(name: str, count: int) -> Place:
    """The place of a generated model's parameter."""
    if name in EMBEDDED:
        return Place(EMBEDDED[name])
    field, layer, rest = name.split(".", 2)
    if field == "skips":  # of a model whose blocks run more than once
        return Place({"scale": "skip_weights", "share": "skip_gates"}[rest], int(layer))
    if rest in BLOCK:
        return Place(f"blocks.{layer}.{BLOCK[rest]}")
    if rest in LANES:
        return Place(f"blocks.{layer}.{LANES[rest][0]}", LANES[rest][1])
    if rest in ("mix.stream", "mix.embedded"):
        return Place(f"blocks.{layer}.resid_mix", int(rest == "mix.embedded"))
    return Place({"skip.scale": "skip_weights", "skip.share": "skip_gates"}[rest], int(layer) - count // 2)


def at(values: Mapping[str, Tensor], where: Place, shape: torch.Size) -> Tensor:
    """A value of the plain model in the shape that the generated one has."""
    result = values[where.name]
    return (result if where.row is None else result[where.row]).reshape(shape)


def copied(p: Plain, parameters: Mapping[str, Tensor]) -> PlainGolf:
    """The plain model with the values of a generated one; every weight of either is one of the other's."""
    model = PlainGolf(p)
    parameters_by_name = dict(model.named_parameters())
    filled = 0
    with torch.no_grad():
        for name, value in parameters.items():
            at(parameters_by_name, place(name, p.count), value.shape).copy_(value)
            filled += value.numel()
    assert filled == sum(value.numel() for value in parameters_by_name.values())
    return model
