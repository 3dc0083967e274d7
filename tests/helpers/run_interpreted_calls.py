"""Calls functions that launch Triton kernels in Triton's interpreter: `TRITON_INTERPRET=1 python ... CASES OUT`.

CASES is a saved list of (folder, package.module, constants of the module by name, function, arguments); the arguments
after the calls are saved to OUT. Numbers are rounded to e4m3 as on a GPU: the interpreter's own conversion drops a
carry of the mantissa into the exponent, and rounds numbers below 2^-6 down.
"""

import importlib
import sys
from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter

convert = interpreter._convert_float


def rounded(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
    """Converts floats as the interpreter does, but rounds f32 to e4m3 as Torch does."""
    if output_dtype != tl.float8e4nv or input_dtype != tl.float32:
        return convert(input, input_dtype, output_dtype, rounding_mode)
    return torch.tensor(input).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


interpreter._convert_float = rounded


def main(cases: str, out: str) -> None:
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
