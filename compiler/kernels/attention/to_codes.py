"""Rounds the rows of a cache to e4m3 codes: in a Triton kernel on GPUs that support e4m3, and in Torch elsewhere."""

from typing import NamedTuple

from specc.compiler.ir.types import DTYPES
from specc.compiler.kernels.attention.cached_torch import TorchCalls
from specc.compiler.kernels.attention.score_tile import block
from specc.compiler.kernels.generated import GeneratedFunction, generated_function, number_of, python_file
from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.kernels.lines import flowed
from specc.compiler.ops.caches.key_value_cache import LARGEST, ToCodes

WIDEST = 4096  # largest number of channels; a program instance holds whole rows in registers
# Elements per program instance; a decoding step rounds few rows, and many small programs finish soonest
ELEMENTS = 1024
WARPS = 4


class CodesContext(NamedTuple):
    """The context of templates/triton/to_codes.py.jinja.

    Attributes:
        how: A description of the kernel's algorithm.
        width: The number of channels per row, padded to a power of two.
        rows: The number of rows per program instance.
        inside: The mask of valid elements, as an expression.
        largest: The largest number of e4m3.
        dtype: The dtype of x.
    """

    op: GeneratedFunction
    how: str
    channels: int
    width: int
    rows: int
    warps: int
    inside: str
    largest: float
    dtype: str


class CodesTriton(Kernel):
    """A kernel that rounds rows to 8-bit codes in one launch. In Torch, each operation of the rounding needs its own
    kernel. The rows have 16-bit values and at most 4,096 channels."""

    def rejects(self, site: Site) -> str | None:
        (x,) = site.inputs
        if x.dtype not in ("bf16", "f16"):
            return f"rounds bf16 or f16, not {x.dtype}"
        return None if number_of(x.width) <= WIDEST else f"takes rows of at most {WIDEST:,} channels, not {x.width}"

    def render(self, site: Site) -> Rendered:
        (x,), channels = site.inputs, number_of(site.inputs[0].width)
        width = block(channels)
        outputs = dict(zip(("codes", "scale"), site.node.types, strict=True))
        shapes = {"x": f"[..., {channels}]", "codes": f"[..., {channels}]", "scale": "[..., 1]"}
        formulas = (
            f"scale = max(abs(x)) / {LARGEST:g} in bf16, or 1 for a row of zeros",
            "codes = the e4m3 number nearest to x / scale",
        )
        summary = f"{site.label}: {site.node.op.words}."
        op = generated_function(site, {"x": x}, outputs, shapes, summary, formulas)
        how = flowed(f"Triton kernel for {site.target.name}: a program rounds whole rows.")
        inside = "(row < N)[:, None]" + (" & (c < C)" if width != channels else "")
        rows = max(1, ELEMENTS // width)
        context = CodesContext(op, how, channels, width, rows, WARPS, inside, LARGEST, DTYPES[x.dtype])
        return python_file(op, "triton/to_codes.py.jinja", context)


CODES_TRITON = CodesTriton("to_codes", "triton", frozenset({"gpu", "fp8_mma"}), ToCodes)
CODES_TORCH = TorchCalls("to_codes_torch", "torch", computes=ToCodes)
