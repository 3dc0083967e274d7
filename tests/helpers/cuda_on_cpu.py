"""Compiles a generated .cu file of plain CUDA C++ for the CPU, over cuda_on_cpu.h: PTX becomes calls of functions that
are named after it. As a program, launches such a library's function on saved tensors and saves what they become:

python cuda_on_cpu.py LIBRARY FUNCTION CASES.pt OUT.pt
"""

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
COMPILER = shutil.which("g++") or shutil.which("c++")
OPERAND = re.compile(r'"=?[rlfn]"\s*\(')
ASM = re.compile(r"\basm(?: volatile)?\(")
SHARED = re.compile(r"extern __shared__ __align__\(128\) (\w+) (\w+)\[\];")


def compiled(source: Path) -> Path:
    """The library of `source`, beside it."""
    assert COMPILER is not None
    text = source.read_text(encoding="utf-8").replace("#include <cuda_bf16.h>", f'#include "{HEADER}"')
    text, result = SHARED.subn(r"\1* const \2 = reinterpret_cast<\1*>(memory);", text)
    assert result == 1
    host_source, code = source.with_suffix(".cpp"), source.with_suffix(".cpu.so")
    host_source.write_text(without_ptx(text), encoding="utf-8")
    command = [COMPILER, "-std=c++20", "-O1", "-fno-strict-aliasing", "-ffp-contract=off", "-w", "-pthread"]
    done = subprocess.run(
        [*command, "-shared", "-fPIC", str(host_source), "-o", str(code)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return code


def without_ptx(text: str) -> str:
    """Each `asm` statement as a call, its operands in their order."""
    while (match := ASM.search(text)) is not None:
        end = _closing(text, match.end() - 1)
        statement = text[match.end() : end]
        operands = []
        for operand in OPERAND.finditer(statement):
            operands.append(statement[operand.end() : _closing(statement, operand.end() - 1)])
        text = f"{text[: match.start()]}{_called(statement)}({', '.join(operands)}){text[end + 1 :]}"
    return text


def _called(statement: str) -> str:
    code = statement.split('"')[1].removeprefix("{ .reg .pred p; ")
    words = code.split(" ")[0].rstrip(";").split(".")
    if words[0] == "fence":
        return "ptx_fence"
    return "_".join(["ptx", *words[: 3 if words[0] == "cp" else 2]])


def _closing(text: str, start: int) -> int:
    """Where the parenthesis at `start` closes."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if not depth:
            return at
    raise AssertionError("a parenthesis is open")


def main(library: str, function: str, cases: str, out: str) -> None:
    """A case is the number of rows and the tensors, or None, that are passed as pointers; what stands behind the cases
    is kept, as their tensors may be views of it."""
    call = getattr(ctypes.CDLL(library), function)
    runs, behind = torch.load(cases)
    for m, tensors in runs:
        pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]
        assert call(ctypes.c_int(m), *pointers, ctypes.c_void_p()) == 0
    torch.save((runs, behind), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
