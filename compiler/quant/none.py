"""No quantization: parameters are stored as floating-point numbers."""

from collections.abc import Mapping
from typing import Literal

from specc.compiler.ir.types import Tensor
from specc.compiler.quant.scheme import ITEM_BYTES, Array, Scheme, SchemeError, Stored, check_arrays, check_weight


class Unquantized(Scheme):
    """Stores the parameter as floats, rounded to nearest even. All shapes are accepted, including scalars.

    Attributes:
        dtype: the dtype of the floats.
    """

    scheme: Literal["none"] = "none"
    dtype: Literal["f16", "bf16", "f32"]

    def label(self) -> str:
        return self.dtype

    def bits_per_value(self) -> float:
        return 8.0 * ITEM_BYTES[self.dtype]

    def stored(self, shape: tuple[int, ...]) -> tuple[Stored, ...]:
        return (Stored("value", self.dtype, shape),)

    def rejects(self, shape: tuple[int, ...]) -> str | None:
        return None

    def quantize(self, weight: Tensor, hessian: Tensor | None) -> dict[str, Array]:
        import torch

        check_weight(self, weight)
        kind = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[self.dtype]
        value = weight.detach().to(kind).cpu().contiguous()
        if not bool(value.isfinite().all()):
            raise SchemeError(f"|w| reaches {float(weight.abs().max()):.4g}, more than {self.dtype} can hold")
        bits = value.view(torch.uint16) if kind is torch.bfloat16 else value
        return {"value": bits.numpy()}

    def dequantize(self, arrays: Mapping[str, Array], shape: tuple[int, ...]) -> Tensor:
        import torch

        check_arrays(self.stored(shape), arrays)
        value = torch.from_numpy(arrays["value"].copy())
        weight = (value.view(torch.bfloat16) if self.dtype == "bf16" else value).float()
        if not bool(weight.isfinite().all()):
            raise SchemeError("the tensor holds NaN or infinity")
        return weight

    def estimate_bytes(self, shape: tuple[int, ...]) -> int:
        return self.stored(shape)[0].bytes
