"""Linear layers with few input rows in plain Torch."""

from typing import ClassVar, NamedTuple

from specc.compiler.expr import torch_text
from specc.compiler.ir.types import DTYPES
from specc.compiler.kernels.gemm.row_parts import parts_of, row_function
from specc.compiler.kernels.generated import GeneratedFunction, python_file
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, unless_cpu
from specc.compiler.kernels.lines import returned
from specc.compiler.ops.decoding.row_linear import RowLinear


class TorchContext(NamedTuple):
    """The context of templates/torch/row_linear.py.jinja."""

    op: GeneratedFunction
    lines: tuple[str, ...]
    returns: str
    uses_torch: bool
    packed: bool


class RowLinearTorch(Kernel):
    """The norm, the products and the epilogue in plain Torch, in the dtype of the inputs."""

    RANK: ClassVar[int] = 9

    def rejects(self, site: Site) -> str | None:
        return unless_cpu(site, "would run the norm, the products and the epilogue as separate kernels")

    def render(self, site: Site) -> Rendered:
        parts = parts_of(site)
        op, lines = row_function(site, parts, "in plain Torch"), []
        if parts.norm is not None:
            gain = "".join(f", {value.name}" for value in parts.gain)
            lines.append(f"x = F.rms_norm(x, ({parts.k},){gain}, eps={parts.norm.eps})")
        weights = [
            f"dequantized({w.name}, {s.name}, {parts.k}).to(x.dtype)"
            for w, s in zip(parts.weights, parts.scales, strict=False)
        ]
        weights = weights or [w.name for w in parts.weights]
        lines += [f"{p} = F.linear(x, {w})" for p, w in zip(parts.products, weights, strict=True)]
        texts = []
        for result in parts.results:
            text, dtype = torch_text(result.expr), result.value.type.dtype
            texts.append(text if dtype == parts.x.type.dtype else f"({text}).to({DTYPES[dtype]})")
        context = TorchContext(
            op, tuple(lines), returned(", ".join(texts)), "torch." in " ".join(texts), bool(parts.scales)
        )
        return python_file(op, "torch/row_linear.py.jinja", context)


ROW_LINEAR_TORCH = RowLinearTorch("row_linear_torch", "torch", computes=RowLinear)
