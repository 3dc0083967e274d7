"""Sites of the kernels of decoding steps: linear layers of few rows, rotation with the write to a cache, lookups."""

from typing import Any

from specc.compiler.ir.graph import Node
from specc.compiler.ir.types import Dim, TensorType
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.caches.key_value_cache import coded_types
from specc.compiler.ops.caches.paged_attention import TABLE
from specc.compiler.ops.decoding.lookups import Lookups
from specc.compiler.ops.decoding.rope_write import RopeWrite
from specc.compiler.ops.decoding.row_linear import RowLinear
from specc.compiler.ops.norm import RmsNorm
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.targets import TARGETS

# widths of the weights, K, norm, epilogue: outputs, variables, those that are columns
Case = tuple[tuple[int, ...], int, RmsNorm | None, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] | None]
RMS, AFFINE = RmsNorm(1e-5), RmsNorm(1e-6, True)
ROW_CASES: dict[str, Case] = {
    "plain": ((70,), 40, None, None),
    "narrow": ((1,), 12, None, None),
    "three after a norm": ((48, 16, 16), 96, RMS, None),
    "two after a norm with a weight": ((20, 36), 72, AFFINE, None),
    "residual": ((33,), 136, None, (("x + 0.5 * branch",), ("branch", "x"), ())),
    "bias and activation": ((40,), 64, AFFINE, (("gelu(p + w)",), ("p", "w"), ("w",))),
    "gated": ((24, 24), 128, RMS, (("silu(gate) * x",), ("x", "gate"), ())),
    "three products": ((24, 24, 24), 128, RMS, (("silu(gate) * x * z + stages",), ("x", "gate", "z", "stages"), ())),
    "two outputs": ((24,), 32, None, (("relu(x) ** 2", "x * y"), ("x", "y"), ())),
}
ROPES: dict[str, dict[str, Any]] = {
    "partial": {},
    "all channels": {"c": 8, "v": 8},
    "neighbors": {"neighbors": True, "h": 3, "g": 3},
    "one group": {"g": 1, "r": 6},
    "codes": {"coded": True},
    "latent": {"g": 1, "c": 8, "v": 20, "joined": True},
    "latent codes": {"g": 1, "v": 21, "joined": True, "coded": True},
    "ring": {"ring": (0, 5)},
    "ring, first positions": {"ring": (2, 3), "neighbors": True},
    "ring, codes": {"ring": (0, 4), "coded": True},
    "ring, latent": {"g": 1, "ring": (1, 4), "joined": True},
    "pages": {"page": 4},
    "pages, codes": {"page": 2, "coded": True, "c": 8},
    "pages, latent": {"g": 1, "page": 4, "joined": True, "r": 6},
    "pages, latent codes": {"g": 1, "page": 8, "joined": True, "coded": True},
}


def row_site(case: Case, target: str = "sm90", dtype: str = "f16", out: str = "", packed: bool = False) -> Site:
    """A site of linear layers of few rows. `out` is the dtype of the outputs if it is another."""
    widths, k, norm, epilogue = case
    op = RowLinear(len(widths), norm and norm.eps, norm is not None and norm.affine, packed=packed)
    types = [TensorType(("B", "T", k), dtype)]
    types += [TensorType((k,), dtype)] if norm is not None and norm.affine else []
    for n in widths:
        types += [TensorType((n, "W"), "u8"), TensorType((n,), "f16")] if packed else [TensorType((n, k), dtype)]
    results = tuple(TensorType(("B", "T", n), out or dtype) for n in widths)
    tail = None
    if epilogue is not None:
        outputs, variables, columns = epilogue
        tail = Pointwise(outputs, variables, ("y", "further") if len(outputs) == 2 else (), title="case")
        shapes: list[tuple[Dim, ...]] = [(widths[0],) if v in columns else ("B", "T", widths[0]) for v in variables]
        types += [TensorType(shape, dtype) for shape in shapes[len(widths) :]]
        results = tuple(results[0] for _ in outputs)
    node = Node("mlp.up", op, tuple(f"@v{i}" for i in range(len(types))), results, tail, ("mlp.up",))
    return Site(node, tuple(types), TARGETS[target], "blocks.*.mlp.up", "sample")


def rope_site(
    h: int = 4, g: int = 2, c: int = 12, v: int = 10, r: int = 4, neighbors: bool = False, *, joined: bool = False,
    coded: bool = False, ring: tuple[int, int] | None = None, page: int = 0, target: str = "sm90", dtype: str = "f16",
    cached: str = "",
) -> Site:  # fmt: skip
    """A site of rotation with the write to a cache of dtype `cached`, by default `dtype`."""
    op = RopeWrite(neighbors, joined, coded, ring, page > 0)
    slots: tuple[Dim, Dim] = ("P", page) if page else ("B", "S" if ring is None else sum(ring))
    widths = (v + c,) if joined else (c, v)
    rows = [TensorType((*slots, g, width), cached or dtype) for width in widths]
    stored = [coded_types(type)[i] for i in (0, 1) for type in rows] if coded else rows
    types = [TensorType(("B", "T", heads, width), dtype) for heads, width in ((h, c), (g, c), (g, v))]
    types += [TensorType(("T", r), "f32")] * 2 + [*stored, TensorType(("T",), "i64"), *([TABLE] if page else [])]
    new = [stored[op.stored.index(name)] for name in op.new]
    results = (types[0], *stored, *(type.with_shape("B", "T", *type.shape[2:]) for type in new))
    node = Node("attention.q.rope", op, (), results, None, ())
    return Site(node, tuple(types), TARGETS[target], "blocks.*.attention.q.rope", "sample")


def lookups_site(
    widths: tuple[int, ...], ropes: tuple[tuple[int, float, int], ...] = (), target: str = "sm90", dtype: str = "f16",
    *, rows: int = 50,
) -> Site:  # fmt: skip
    """A site of lookups in embeddings of `rows` rows, and in tables of angles."""
    ids, positions = TensorType(("B", 1), "i64"), TensorType((1,), "i64")
    labels = (
        *(f"rows_{i}" for i in range(len(widths))),
        *(f"{w}_{i}" for i in range(len(ropes)) for w in ("cos", "sin")),
    )
    op = Lookups(len(widths), ropes, labels)
    types = [type for width in widths for type in (ids, TensorType((rows, width), dtype))] + [positions] * len(ropes)
    node = Node("embed.token", op, (), op.infer(types), None, ("embed.token",))
    return Site(node, tuple(types), TARGETS[target], "embed.token", "sample")
