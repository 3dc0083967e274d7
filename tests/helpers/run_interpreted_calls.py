"""Calls functions that launch Triton kernels in Triton's interpreter: `TRITON_INTERPRET=1 python ... CASES OUT`.

CASES is a saved list of (folder, package.module, constants of the module by name, function, arguments); the arguments
after the calls are saved to OUT.
"""

import importlib
import sys
from types import SimpleNamespace

import torch


def main(cases: str, out: str) -> None:
    # Two programs, so that a persistent kernel has to take several tiles each.
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=2)
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
