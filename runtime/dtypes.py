"""Maps the compiler's names of dtypes to Torch dtypes."""

import torch

from specc.compiler.ir.types import DTYPES as SPELLINGS

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, text.removeprefix("torch.")) for name, text in SPELLINGS.items()}
