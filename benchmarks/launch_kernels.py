"""Launches every kernel of a spec's plan, with the tiles of its lock: for a few row counts, and for so many rows that
every multiprocessor computes several tiles in turn. `specc verify` checks the values that they compute.

python benchmarks/launch_kernels.py specs/gpt_mlp35_base.yaml sm90 --sanitize

`--sanitize` runs this script under each tool of compute-sanitizer (of CUDA 12.3 or later), and summarizes the reports.
The tools check only the kernels of the plan, and those that fill tensors. In cuBLAS, cuDNN and Torch, they would take
hours, and would report errors that this project cannot fix. `--sanitize racecheck` runs one tool. `--without attention`
skips the kernels whose module name contains this word. `--deployed` launches the kernels of int8 artifacts. `--tiles`
is the minimum number of the largest tiles per multiprocessor; with 0, the kernels are launched only for the few row
counts. `--shapes` is the number of these row counts. The exit code is 1 if a tool reports an error or does not finish.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from specc.compiler import pipeline
from specc.compiler.build import kernel_files
from specc.compiler.kernels.int8.gemm import int8_epilogue
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.quantized import Int8Linear
from specc.compiler.plan.lock import Lock, lock_path, read_lock
from specc.compiler.plan.plan import Choice, Plan
from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec
from specc.runtime.bench.profile import CUDA_KERNEL
from specc.runtime.model.load import device_of, instantiate
from specc.runtime.verify.judge import inputs_of, many_sizes, sizes_of
from specc.runtime.verify.random_inputs import int8_operands

ROWS = (1, 129, 300, 2, 7, 64, 127, 128, 255, 511)
FEW = 3  # of ROWS are launched unless `--shapes` states another number
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
TILES = 1  # of 256 x 256, which is several tiles of most kernels; racecheck takes a thousand times as long as a kernel
# The names of kernels in machine code, by source: Triton, CUDA C++, and CUTLASS 3 and 2. cuBLAS also has kernels of the
# last kind, but their types have other names.
NAMED = (re.compile(r"^@triton\.jit.*\ndef (\w+_kernel)\(", re.MULTILINE), CUDA_KERNEL)
FILL = "FillFunctor"  # Torch's kernel that fills tensors, whose writes initcheck then tracks
CUTLASS = ("GemmUniversalAdapter", ("cutlass13device_kernel", "cutlass7Kernel2INS_4gemm"))
SUMMARY = re.compile(r"^========= ((?:ERROR|RACECHECK) SUMMARY: .*)$", re.MULTILINE)
CLEAN = re.compile(r"SUMMARY: 0 (?:errors|hazards)")


def launched(plan: Plan, without: str) -> tuple[Choice, ...]:
    """Returns the choices whose module names do not contain `without`; all choices if it is empty."""
    chosen = tuple(choice for choice in plan.generated if not without or without not in choice.rendered.module)
    if not chosen:
        raise SystemExit(f"no kernel is left to launch without {without!r}")
    return chosen


def kernel_names(texts: Sequence[str]) -> tuple[str, ...]:
    """Returns parts of the mangled names of the kernels that the sources `texts` define. Each name contains one of
    them."""
    names: dict[str, None] = {}
    for text in texts:
        names |= dict.fromkeys(name for pattern in NAMED for name in pattern.findall(text))
        names |= dict.fromkeys(CUTLASS[1] if CUTLASS[0] in text else ())
    return tuple(names)


def inputs(site: Site, device: str, tiles: int, shapes: int) -> Iterator[list[Tensor]]:
    """Yields the inputs of one launch for each row count. `shapes` is the number of row counts. The inputs are copied
    from the host, because initcheck tracks copies, but not the writes of kernels that it does not check."""
    few = [sizes_of(site, rows) for rows in ROWS[:shapes]]
    large = many_sizes(site, device, tiles) if tiles else None
    for sizes in (*few, *([large] if large is not None else ())):
        if isinstance(site.node.op, Int8Linear):
            values = int8_operands(int8_epilogue(site), sizes["B"] * sizes["T"], torch.device("cpu"))
        else:
            values = inputs_of(site, sizes, "cpu")
        yield [value.to(device) for value in values]


def command(tool: str, names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Returns the command that runs this script under a tool of compute-sanitizer. The tool checks only kernels of
    `names`."""
    filters = ["--kernel-name", ",".join(f"kns={name}" for name in (*names, FILL))]
    return ["compute-sanitizer", "--tool", tool, *filters, sys.executable, __file__, *arguments]


def sanitize(tools: Sequence[str], names: Sequence[str], arguments: Sequence[str]) -> int:
    """Runs this script under all tools at once and prints the results. Returns 1 if a tool reports an error, else 0."""
    if not names:
        raise SystemExit("no kernel of the plan has machine code of its own: there is nothing to look at")
    # one allocation per tensor, because memcheck does not detect an access beyond a tensor within an allocation
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

    def run(tool: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command(tool, names, arguments), env=environment, stdout=subprocess.PIPE, text=True)

    endings = []
    with ThreadPoolExecutor() as pool:  # the tools spend most of their time on one core
        for tool, done in zip(tools, pool.map(run, tools), strict=True):
            print(*command(tool, names, arguments))
            print(done.stdout, flush=True)
            said = SUMMARY.findall(done.stdout)
            ended = f"{said[-1] if said else 'no summary'}; the script ends with {done.returncode}"
            endings.append((tool, ended, bool(said) and bool(CLEAN.search(said[-1])) and done.returncode == 0))
    for tool, ended, _ in endings:
        print(f"{tool}: {ended}")
    return 0 if all(clean for *_, clean in endings) else 1


def launch(spec: Spec, plan: Plan, chosen: Sequence[Choice], lock: Lock, options: argparse.Namespace) -> None:
    """Launches the kernels one after the other, and waits for each, so that an error appears below the name of its
    kernel."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = instantiate(spec, options.target, Path(folder), lock=lock, deployed=options.deployed)
        module, device = vars(sys.modules[type(loaded.model).__module__]), device_of(loaded.target)
        for choice in chosen:
            for values in inputs(choice.site, device, options.tiles, options.shapes):
                print(choice.rendered.module, list(values[0].shape), flush=True)
                module[plan.called(choice)](*values)
                if device == "cuda":
                    torch.cuda.synchronize()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("target")
    parser.add_argument("--without", default="")
    parser.add_argument("--deployed", action="store_true")
    parser.add_argument("--tiles", type=int, default=TILES)
    parser.add_argument("--shapes", type=int, default=FEW)
    parser.add_argument("--sanitize", nargs="*", choices=TOOLS, metavar="TOOL")
    options = parser.parse_args(arguments)
    spec, _ = load(options.spec)
    lock = read_lock(lock_path(options.spec, spec.name))
    plan = (pipeline.deployed_plan if options.deployed else partial(pipeline.plan, lock=lock))(spec, options.target, "")
    if plan is None:
        raise SystemExit(f"{options.spec} deploys what it trains: leave --deployed out")
    chosen = launched(plan, options.without)
    if options.sanitize is None:
        launch(spec, plan, chosen, lock, options)
        return 0
    texts = [text for choice in chosen for text in kernel_files(choice.rendered, choice.key, "").values()]
    words = [str(options.spec), options.target, "--without", options.without, "--tiles", str(options.tiles)]
    words += ["--shapes", str(options.shapes)] * (options.shapes != FEW)
    return sanitize(options.sanitize or TOOLS, kernel_names(texts), words + ["--deployed"] * options.deployed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
