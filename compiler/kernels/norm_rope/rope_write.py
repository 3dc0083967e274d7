"""Kernels of `RopeWrite`: rotation and the write to a cache in one Triton kernel, and in plain Torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from specc.compiler.ir.types import DTYPES, TensorType
from specc.compiler.kernels.epilogue import FLOATS
from specc.compiler.kernels.gemm.rows import DEPENDENT_LAUNCH
from specc.compiler.kernels.generated import (
    TRITON_DTYPES,
    GeneratedFunction,
    generated_function,
    number_of,
    python_file,
)
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, unless_cpu
from specc.compiler.ops.decoding.rope_write import RopeWrite

NAMES = ("q", "k", "v", "cos", "sin", "keys", "values", "positions")
WIDEST = 1024  # channels of a head that one program holds


@dataclass(frozen=True, slots=True)
class RopeWriteContext:
    """The context of templates/triton/rope_write.py.jinja and templates/torch/rope_write.py.jinja.

    Attributes:
        op: the description of the function.
        heads: the query heads.
        groups: the key heads.
        channels: the channels of a query or key.
        values: the channels of a value.
        pairs: the rotated pairs of channels.
        step: the distance from a pair's first channel to that of the next pair.
        apart: the distance between the channels of a pair.
        dtype: the dtype of q, k and v.
        triton_dtype: the same in Triton.
        pdl: whether the kernel begins before the one before it ends.
    """

    op: GeneratedFunction
    heads: int
    groups: int
    channels: int
    values: int
    pairs: int
    step: int
    apart: int
    dtype: str
    triton_dtype: str
    pdl: bool


def context_of(site: Site, made_by: str) -> RopeWriteContext:
    op, (q, k, v, cos, *_) = site.node.op, site.inputs
    assert isinstance(op, RopeWrite)
    inputs = dict(zip(NAMES, site.inputs, strict=True))
    outputs = {"rotated": site.node.types[0], "keys": site.node.types[1], "values": site.node.types[2]}
    shapes = {name: _shape(name, type) for name, type in (inputs | outputs).items()}
    pairs, step, apart = number_of(cos.width), 1 + op.neighbors, 1 if op.neighbors else number_of(cos.width)
    first = f"{step} * i" if step > 1 else "i"
    formulas = (
        f"a, b = x[{first}], x[{first} + {apart}], for i < {pairs}, in fp32",
        f"y[{first}], y[{first} + {apart}] = a * cos[i] + b * sin[i], b * cos[i] - a * sin[i]",
    )
    summary = f"{site.label}: rotary embedding of q and k, and the write of k and v to a cache, {made_by}."
    function = generated_function(site, inputs, outputs, shapes, summary, formulas)
    heads, groups, channels, values = map(number_of, (q.shape[-2], k.shape[-2], q.width, v.width))
    pdl = site.target.arch >= DEPENDENT_LAUNCH
    dtypes = DTYPES[q.dtype], TRITON_DTYPES.get(q.dtype, "")
    return RopeWriteContext(function, heads, groups, channels, values, pairs, step, apart, *dtypes, pdl)


def _shape(name: str, type: TensorType) -> str:
    rows: Mapping[str, str] = {"cos": "T", "sin": "T", "positions": "T", "keys": "B, S", "values": "B, S"}
    fixed = [str(dim) for dim in type.shape[1 if name in ("cos", "sin", "positions") else 2 :]]
    return f"[{', '.join((rows.get(name, 'B, T'), *fixed))}]"


class RopeWriteTriton(Kernel):
    """A program takes one head of one token."""

    def rejects(self, site: Site) -> str | None:
        q, k, v, cos, sin, keys, values, _ = site.inputs
        if q.dtype not in FLOATS or len({type.dtype for type in (q, k, v, keys, values)}) > 1:
            return (
                f"reads and writes one dtype of {', '.join(FLOATS)}; q is {q}, and the caches are {keys} and {values}"
            )
        if cos.dtype != "f32" or sin.dtype != "f32":
            return f"rotates by angles in f32, not {cos}"
        if (widest := max(number_of(q.width), number_of(v.width))) > WIDEST:
            return f"holds heads of up to {WIDEST} channels, not {widest}"
        return None

    def render(self, site: Site) -> Rendered:
        context = context_of(site, "in one kernel")
        return python_file(context.op, "triton/rope_write.py.jinja", context)


ROPE_WRITE_TRITON = RopeWriteTriton("rope_write_triton", "triton", computes=RopeWrite)


class RopeWriteTorch(Kernel):
    """Rotation in f32, and a copy to the rows of the caches."""

    RANK: ClassVar[int] = 9

    def rejects(self, site: Site) -> str | None:
        return unless_cpu(site, "would rotate and write in a dozen kernels")

    def render(self, site: Site) -> Rendered:
        context = context_of(site, "in plain Torch")
        return python_file(context.op, "torch/rope_write.py.jinja", context)


ROPE_WRITE_TORCH = RopeWriteTorch("rope_write_torch", "torch", computes=RopeWrite)
