"""Calls functions that launch Triton kernels in Triton's interpreter: `TRITON_INTERPRET=1 python ... CASES OUT`.

CASES is a saved list of (folder, package.module, constants of the module by name, function, arguments); the arguments
after the calls are saved to OUT. Numbers are rounded to e4m3 as on a GPU: the interpreter's own conversion drops a
carry of the mantissa into the exponent, and rounds numbers below 2^-6 down.
"""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

EIGHT_BITS = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
convert = interpreter._convert_float


def nearest(value: Any, given: Any, wanted: Any, rounding: Any) -> Any:
    """Converts floats as the interpreter does, but rounds f32 to 8 bits as Torch does."""
    if (dtype := EIGHT_BITS.get(wanted.name)) is None or given.name != "fp32":
        return convert(value, given, wanted, rounding)
    return torch.from_numpy(np.ascontiguousarray(value)).to(dtype).view(torch.uint8).numpy()


def main(cases: str, out: str) -> None:
    # Two programs, so that a persistent kernel has to take several tiles each.
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=2)
    torch.cuda.is_current_stream_capturing = lambda: False
    # The interpreter has no PTX. The only instruction that kernels name is tanh.approx.
    tl.inline_asm_elementwise = lambda asm, constraints, args, **_: 2 * tl.sigmoid(2 * args[0]) - 1
    interpreter._convert_float = nearest
    results = []
    for folder, module, constants, function, arguments in torch.load(cases):
        if folder not in sys.path:
            sys.path.insert(0, folder)
        code = importlib.import_module(module)
        vars(code).update(constants)
        vars(code)[function](*arguments)
        results.append(arguments)
    torch.save(results, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
