"""Sites of the kernels of decoding steps: linear layers of few rows, and rotation with the write to a cache."""

from typing import Any

from specc.compiler.ir.graph import Node
from specc.compiler.ir.types import Dim, TensorType
from specc.compiler.kernels.kernel import Site
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
    "two outputs": ((24,), 32, None, (("relu(x) ** 2", "x * y"), ("x", "y"), ())),
}
ROPES: dict[str, dict[str, Any]] = {
    "partial": {},
    "all channels": {"c": 8, "v": 8},
    "neighbors": {"neighbors": True, "h": 3, "g": 3},
    "one group": {"g": 1, "r": 6},
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
    h: int = 4, g: int = 2, c: int = 12, v: int = 10, r: int = 4, neighbors: bool = False, *, target: str = "sm90",
    dtype: str = "f16", cached: str = "",
) -> Site:  # fmt: skip
    """A site of rotation with the write to caches of dtype `cached`, by default `dtype`."""
    shapes: list[tuple[Dim, ...]] = [("B", "T", h, c), ("B", "T", g, c), ("B", "T", g, v), ("T", r), ("T", r)]
    shapes += [("B", "S", g, c), ("B", "S", g, v), ("T",)]
    dtypes = [dtype, dtype, dtype, "f32", "f32", cached or dtype, cached or dtype, "i64"]
    types = tuple(map(TensorType, shapes, dtypes))
    node = Node("attention.q.rope", RopeWrite(neighbors), (), (types[0], types[5], types[6]), None, ())
    return Site(node, types, TARGETS[target], "blocks.*.attention.q.rope", "sample")
