"""Checks Triton kernels on random nodes in Triton's interpreter:

TRITON_INTERPRET=1 python run_random_nodes.py FOLDER SHAPES KERNEL ...

What is wrong is saved as JSON to FOLDER/wrong.json.

The ops require tensors of a GPU. Here every tensor says that it is on one.
"""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from random_sites import KERNELS, Place, inexact, strays


def assembly(asm: Any, constraints: Any, args: Any, **_: Any) -> Any:
    """Computes the instructions of kernels, which the interpreter does not know: `tanh.approx`, and prefetches."""
    return args[0] if "prefetch" in str(asm) else 2 * tl.sigmoid(2 * args[0]) - 1


def main(folder: str, shapes: str, *names: str) -> None:
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=2)
    torch.cuda.is_current_stream_capturing = lambda: False
    tl.inline_asm_elementwise = assembly
    cuda = importlib.import_module("triton.language.extra.cuda")  # its package has another module of this name
    cuda.gdc_wait = cuda.gdc_launch_dependents = lambda: None  # kernels run one after another
    # the interpreter's dot is wrong in bf16
    place = Place(Path(folder), "sm90", dtypes=("f16", "f32"), most=70)
    wrong = {
        name: [*place.check(KERNELS[name], inexact, int(shapes)), *place.check(KERNELS[name], strays, 1)]
        for name in names
    }
    (Path(folder) / "wrong.json").write_text(json.dumps(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
