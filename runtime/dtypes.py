"""Torch dtypes, keyed by the names that the compiler uses for them."""

import torch

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i8": torch.int8,
    "bool": torch.bool,
}
