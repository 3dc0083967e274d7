"""Sites of attention over a cache, and random inputs that belong together: lengths, pages, rings, codes."""

from dataclasses import dataclass, field

import torch
from kernel_sites import DTYPES
from scored_sites import Attention, wide_of
from torch import Tensor

from specc.compiler.expr.mask import bound_mask
from specc.compiler.expr.score import bound_score
from specc.compiler.ir.graph import Node
from specc.compiler.ir.types import Dim, TensorType
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.caches.cached_attention import CachedBase, SdpaCached
from specc.compiler.ops.caches.key_value_cache import ToCodes, coded_types, ring_positions
from specc.compiler.ops.caches.paged_attention import TABLE, SdpaPaged
from specc.compiler.targets import TARGETS

CONTEXT = 2048
AT_ONCE = 8


@dataclass(frozen=True)
class Cached:
    """Attention over a cache as a spec states it.

    Attributes:
        attention: the score, the mask and related settings.
        shape: the heads of queries, the heads of keys, and the channels of keys.
        values: the channels of values, if they are another number, or the first ones of the keys.
        shared: whether the values are the first channels of the keys.
        page: the positions of a page; 0 without pages.
        ring: the first positions and the last ones that a ring holds.
        coded: whether the cache holds e4m3 codes.
        prefix: the tokens that attend to each other.
    """

    attention: Attention = field(default_factory=Attention)
    shape: tuple[int, int, int] = (4, 2, 16)
    values: int = 0
    shared: bool = False
    page: int = 0
    ring: tuple[int, int] | None = None
    coded: bool = False
    prefix: int = 0

    def site(self, dtype: str = "bf16", target: str = "sm90", context: int | None = CONTEXT) -> Site:
        """A site of several queries per text."""
        heads, groups, channels = self.shape
        attention, values = self.attention, self.values or channels
        mask = bound_mask(attention.mask, heads, CONTEXT, self.prefix)
        score = bound_score(attention.score, tuple(attention.tables.items()), mask, heads, CONTEXT)
        form = (score, mask, attention.scale, tuple(attention.tables), attention.sinks)
        settings = (*form, values if self.shared else None, self.coded)
        op: CachedBase = (SdpaPaged if self.page else SdpaCached)(*settings, self.ring)
        where: tuple[Dim, Dim] = ("P", self.page) if self.page else ("B", "S" if self.ring is None else sum(self.ring))
        stored = [TensorType((*where, groups, channels), dtype)]
        stored += [] if self.shared else [TensorType((*where, groups, values), dtype)]
        scales = [coded_types(type)[1] for type in stored] if self.coded else []
        stored = [coded_types(type)[0] for type in stored] if self.coded else stored
        inputs = [TensorType(("B", "T", heads, channels), dtype), *stored, TensorType(("T",), "i64")]
        inputs += [*([TABLE] if self.page else []), *scales]
        new = (*stored, *scales) if self.ring is not None else ()
        inputs += [type.with_shape("B", "T", *type.shape[2:]) for type in new]
        inputs += [TensorType(("B", "T"), "i64")] if op.documents else []
        inputs += [TensorType((heads,), dtype)] if attention.sinks else []
        inputs += [TensorType(dims, dtype) for dims in attention.tables.values()]
        node = Node("attention.y", op, tuple(f"v{i}" for i in range(len(inputs))), op.infer(inputs))
        return Site(node, tuple(inputs), TARGETS[target], "blocks.*.attention.y", "sample", context)


def codes_site(channels: int, dtype: str, target: str = "sm90") -> Site:
    """A site of rounding rows to e4m3."""
    x = TensorType(("B", "T", channels), dtype)
    node = Node("attention.k.codes", ToCodes(), ("x",), ToCodes().infer([x]))
    return Site(node, (x,), TARGETS[target], "blocks.*.attention.k.codes", "sample")


def cached_inputs(
    case: Cached, site: Site, lengths: tuple[int, ...], each: int, seed: int, apart: int = 0
) -> list[Tensor]:
    """Random inputs: texts of `lengths` tokens, of which the last `each` are queries.

    Without pages, all texts have the first length. Rows that hold no token have large values, which must not be read.
    `apart` is the number of positions after those of a text in the tensor that holds the cache.
    """
    op, generator = site.node.op, torch.Generator().manual_seed(seed)
    assert isinstance(op, CachedBase)
    heads, groups, channels = case.shape
    dtype, texts, length = DTYPES[site.inputs[0].dtype], len(lengths), lengths[0]
    widths = {"k": channels} | ({} if case.shared else {"v": case.values or channels})
    every = {n: torch.randn(texts, max(lengths), groups, w, generator=generator) for n, w in widths.items()}
    given: dict[str, Tensor] = {}
    if case.page:
        pages = -(-max(lengths) // case.page) + 1
        table = torch.randperm(texts * pages, generator=generator).view(texts, pages)
        given["table"] = table
        rows = {n: torch.full((texts * pages, case.page, *x.shape[2:]), 99.0) for n, x in every.items()}
        for text, count in enumerate(lengths):
            place = torch.arange(count)
            for n, x in every.items():
                rows[n][table[text, place // case.page], place % case.page] = x[text, :count]
        begin = torch.tensor(lengths) - each
        given["positions"] = (begin[:, None] + torch.arange(each)).flatten()
        q_shape: tuple[int, ...] = (1, texts * each, heads, channels)
    else:
        given["positions"] = torch.arange(length - each, length)
        q_shape = (texts, each, heads, channels)
        size = sum(case.ring) if case.ring is not None else length + 3
        rows = {n: torch.full((texts, size + apart, *x.shape[2:]), 99.0) for n, x in every.items()}
        at = ring_positions(*case.ring, length - each) if case.ring is not None else torch.arange(length)
        held = (at < length).nonzero().flatten()  # rows of the cache
        for n, x in every.items():
            rows[n][:, held] = x[:, at[held]]
        if case.ring is not None:
            rows |= {f"new_{n}": x[:, length - each :] for n, x in every.items()}
    for n, x in rows.items():
        given[n] = x.to(dtype)
        if case.coded:
            given[n], scale = ToCodes().reference(given[n])
            given[f"{n}_scale"] = scale.float()
    if not case.page:
        stored = [n for n in given if n in ("k", "v", "k_scale", "v_scale")]
        given |= {n: given[n][:, : given[n].shape[1] - apart] for n in stored}  # a cache is a part of a longer one
    given["q"] = torch.randn(q_shape, generator=generator).to(dtype)
    marks = torch.rand((texts, length), generator=generator) * 17 < 1
    given["start"] = torch.where(marks, torch.arange(length), 0).cummax(1).values[:, length - each :]
    types = dict(zip(op.names, site.inputs, strict=True))
    for n in op.names:
        if n not in given:
            given[n] = torch.randn([int(dim) for dim in types[n].shape], generator=generator).to(dtype)
    return [given[n] for n in op.names]


def exact(site: Site, inputs: list[Tensor]) -> Tensor:
    """The output in float64, of the inputs as they are. Of AT_ONCE texts at a time: it has the keys of every head."""
    by_text = [type.shape[0] == "B" for type in site.inputs]
    count = -(-len(inputs[0]) // AT_ONCE)
    parts = [x.split(AT_ONCE) if each else (x,) * count for x, each in zip(inputs, by_text, strict=True)]
    results = [site.node.op.reference(*map(wide_of, part)) for part in zip(*parts, strict=True)]
    return torch.cat([y for y in results if isinstance(y, Tensor)])


WINDOW, FIRST = (
    Attention(mask="j <= i and i - j < 20"),
    Attention("5 * tanh(s / 5)", "j <= i and (i - j < 16 or j < 4)"),
)
DOCUMENTS = Attention(mask="j <= i and document(i) == document(j)", sinks=True)
CASES = {
    "plain": Cached(),
    "many heads of one key": Cached(shape=(40, 1, 24)),
    "other values": Cached(shape=(3, 3, 32), values=16),
    "alibi, sinks": Cached(Attention("s - slope(h) * (i - j)", sinks=True)),
    "documents": Cached(DOCUMENTS),
    "documents in a window": Cached(
        Attention("s / 2", "j <= i and document(i) == document(j) and i - j < 900", scale=0.3)
    ),
    "nothing seen at first": Cached(Attention(mask="j < i")),
    "table": Cached(Attention("s + bias[h, bucket(i - j, 8, 20)] * w[h]", tables={"bias": (4, 8), "w": (4,)})),
    "prefix": Cached(Attention(mask="j <= i or j < prefix"), prefix=7),
    "ring": Cached(WINDOW, ring=(0, 20)),
    "ring, first keys": Cached(FIRST, ring=(4, 16)),
    "ring, documents": Cached(Attention(mask="j <= i and i - j < 20 and document(i) == document(j)"), ring=(0, 20)),
    "ring, codes": Cached(WINDOW, ring=(0, 20), coded=True),
    "latent": Cached(shape=(6, 1, 24), values=16, shared=True),
    "latent, other sizes": Cached(shape=(6, 1, 25), values=20, shared=True, coded=True),
    "codes": Cached(coded=True),
    "pages": Cached(page=16),
    "pages, few positions": Cached(WINDOW, page=4),
    "pages, first keys": Cached(FIRST, page=64),
    "pages, latent codes": Cached(shape=(12, 1, 24), values=16, shared=True, coded=True, page=64),
    "pages, codes, sinks": Cached(Attention(sinks=True), shape=(4, 4, 16), coded=True, page=32),
}
