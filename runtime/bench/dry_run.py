"""Implements `specc train --dry-run`: checks all inputs of a run without a GPU, and trains two steps on the CPU."""

import json
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as recorder

from specc.compiler import pipeline
from specc.compiler.build import canonical, plan_loaded
from specc.compiler.plan.lock import NO_LOCK, Lock
from specc.compiler.programs.cost import flops_per_token
from specc.compiler.report.summary import Summary, lines
from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec
from specc.runtime.bench.step import random_trainer
from specc.runtime.errors import RunFailure
from specc.runtime.log import Say
from specc.runtime.model.load import instantiate
from specc.runtime.train.sources.source import source_of
from specc.runtime.verify.reduced import reduced

CPU = "cpu"
MOST = 10**12  # the maximum number of floating-point operations of a step that runs in full size
STEPS = 2  # the number of steps; unlike the first step, the second step finds existing optimizer state


@dataclass(frozen=True, slots=True)
class DryRun:
    """The result of a dry run.

    Attributes:
        summary: the lines of `specc plan` for the target.
        parts: the estimated bytes of each kind of tensor, at the peak of a step on the target.
        measured: True if `bytes` was measured earlier on a GPU, and comes from the lock file. False if `bytes` is an
            estimate.
        bytes: the peak memory of all tensors of a step on the target.
        data: a description of the data that was opened; empty if no data was given.
        full: whether the steps on the CPU used the model and the batch of the spec. If False, they used a smaller model
            and one row.
        size: a description of the steps on the CPU.
        loss: the loss of the last step on the CPU.
        seconds: the seconds of the last step on the CPU.
        peak: the measured peak memory of all tensors of the steps on the CPU, in bytes. It excludes the memory of
            Python, of libraries and of mapped files.
        estimate: the compiler's estimate of `peak`.
    """

    summary: tuple[str, ...]
    parts: Mapping[str, int]
    measured: bool
    bytes: int
    data: str
    full: bool
    size: str
    loss: float
    seconds: float
    peak: int
    estimate: int

    def lines(self) -> list[str]:
        how = "measured, from the lock" if self.measured else "forecast:"
        rows = [*self.summary, f"memory       {how} {self.bytes / 1e6:,.1f} MB on the target"]
        rows += [f"  {name:<24} {bytes / 1e6:>12,.1f} MB" for name, bytes in self.parts.items()]
        rows += [f"data         {self.data}"] if self.data else ["data         not checked: name it with --data"]
        rows.append(f"step         ran on the CPU, {self.size}: loss {self.loss:.4f}, {self.seconds:.2f} s")
        ratio = f"{self.estimate / self.peak:.2f} times that"
        rows.append(f"  its tensors had at most {self.peak / 1e6:,.1f} MB; the estimate is {ratio}")
        return rows


def dry_run(
    spec: Spec, target: str, data: str | None, search: tuple[Path, ...], cache: Path, say: Say, lock: Lock = NO_LOCK
) -> DryRun:
    """Checks the spec and the data of a run without starting the run, and trains two steps on the CPU.

    Args:
        spec: the spec.
        target: the target of the run. This machine need not be able to run the target.
        data: the data of the run. The function opens the data, and tokenizes text. If `data` is None, no data are
            checked.
        search: folders to search for the tokenizer.
        cache: the folder that caches tokenized text.
        say: is called with messages about the progress.
        lock: the kernels that were fastest in measurements.

    Raises:
        LoweringError: the spec cannot be planned for the target.
        DataError: the data cannot be read, or do not fit the spec.
        RunFailure: the loss of the last step is not finite.
    """
    summary = Summary(spec, plan_loaded(spec, None, (target,), lock).plans, {})
    step = summary.step
    with ExitStack() as stack:
        described = ""
        if data is not None:
            say(f"opens {data}")
            digests = source_of(spec)(spec, search).open(data, cache, stack).digests
            described = f"{data}: train {digests.train[:12]}, val {digests.val[:12]}"
        full, small = _for_cpu(spec)
        say("runs two steps on the CPU")
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="specc-"))
        with recorder(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            trainer = random_trainer(instantiate(small, CPU, Path(folder) / "code"), torch.device(CPU), stack)
            for _ in range(STEPS):
                began = time.perf_counter()
                steps = [*trainer.advance(), *trainer.settle()]
                seconds = time.perf_counter() - began
        recorded.export_chrome_trace(str(trace := Path(folder) / "trace.json"))
        peak, loss = _peak(trace), steps[-1].loss
    if not torch.isfinite(torch.tensor(loss)):
        raise RunFailure(f"the loss of the last step is {loss}")
    return DryRun(
        summary=lines(summary),
        parts=step.memory.parts,
        measured=step.timing is not None,
        bytes=step.timing.memory if step.timing is not None else step.memory.total,
        data=described,
        full=full,
        size="in full size" if full else f"one row of {small.model.title}",
        loss=loss,
        seconds=seconds,
        peak=peak,
        estimate=Summary(small, plan_loaded(small, None, (CPU,)).plans, {}).step.memory.total,
    )


def _for_cpu(spec: Spec) -> tuple[bool, Spec]:
    """Returns whether a training step of `spec` is small enough for the CPU, and the spec to train on the CPU.

    If a step is too large, the returned spec has a smaller model with the same kinds of blocks, and one row per step.
    """
    data = json.loads(canonical(spec))
    data["targets"] = [CPU]
    local = load(json.dumps(data))[0]
    window = spec.model.window
    work = 3 * flops_per_token(pipeline.lower(local, CPU), window) * spec.train.rows(window) * window
    if work <= MOST:
        return True, local
    data = json.loads(canonical(reduced(local) or local))
    train = data["train"]
    train["micro_batch"] = 1
    train["batch" if train.get("batch") is not None else "tokens_per_step"] = 1 if train.get("batch") else window
    return False, load(json.dumps(data))[0]


def _peak(trace: Path) -> int:
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((event["ts"], int(event["args"]["Bytes"])) for event in events if event["name"] == "[memory]")
    return max(accumulate(size for _, size in changes))
