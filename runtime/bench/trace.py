"""Records a trace of training steps for a viewer such as Perfetto.

Lists the times of the kernels or operators in the trace.
"""

import gzip
import json
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as recorder

from specc.compiler.build import plan_loaded
from specc.compiler.plan.lock import NO_LOCK, Lock
from specc.compiler.spec.spec import Spec
from specc.compiler.targets import TARGETS
from specc.runtime.bench.profile import Kernel, generated_names, read
from specc.runtime.bench.step import random_trainer
from specc.runtime.bench.timing import wait
from specc.runtime.errors import ExportError, RunFailure
from specc.runtime.log import Say
from specc.runtime.model.load import choose_target, device_of, instantiate
from specc.runtime.storage.atomic import require_replaceable, write_atomically

LIMIT = 50_000_000  # the maximum size of a trace in bytes; viewers load larger traces slowly or not at all
WARM_UP = 4  # the number of steps before the trace; the first step compiles code and captures graphs
HOST = frozenset(
    {"cpu_op", "python_function", "ac2g", "fwdbwd"}
)  # the categories of events that are omitted if a trace exceeds the limit


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded trace.

    Attributes:
        path: the file of the trace.
        bytes: the size of the file in bytes.
        whole: whether the file contains all events. If False, the events of host operators are omitted.
        steps: the number of recorded steps.
        target: the target that was trained on.
        ms: the total time of all entries, in ms per step. If kernels run concurrently, the full time of each kernel
            counts.
        entries: the kernels on a GPU, or the operators on a CPU, in descending order of time. The time of an operator
            excludes the operators that it calls.
    """

    path: Path
    bytes: int
    whole: bool
    steps: int
    target: str
    ms: float
    entries: tuple[Kernel, ...]

    def lines(self, top: int) -> list[str]:
        rows = [f"{'ms/step':>10} {'share':>6} {'calls':>8}  {'class':<13}  name"]
        for entry in self.entries[:top]:
            share = f"{entry.ms / self.ms:.1%}" if self.ms else "-"
            rows.append(f"{entry.ms:>10.4g} {share:>6} {entry.calls:>8.4g}  {entry.kind:<13}  {entry.name[:90]}")
        rest = self.entries[top:]
        if rest:
            ms = sum(entry.ms for entry in rest)
            rows.append(f"{ms:>10.4g} {ms / self.ms:>6.1%} {'':>8}  {'':<13}  {len(rest)} more")
        steps = f"{self.steps} step{'s' * (self.steps > 1)}"
        content = "all events" if self.whole else "without operators of the host"
        return [*rows, f"wrote {self.path}: {steps} on {self.target}, {content}, {self.bytes:,} bytes"]


def record_trace(
    spec: Spec,
    target: str | None,
    steps: int,
    out: Path,
    *,
    lock: Lock = NO_LOCK,
    force: bool = False,
    say: Say = lambda _: None,
    limit: int = LIMIT,
) -> Trace:
    """Records a trace of training steps on random data, after a warm-up.

    Torch's profiler records the trace. The profiler needs no permission to read GPU hardware counters.

    Args:
        spec: the spec.
        target: a target of the spec. None selects the best target that this machine can run.
        steps: the number of steps.
        out: the file for the trace, a gzipped Chrome trace.
        lock: the kernels that were fastest in measurements.
        force: whether to replace an existing file.
        say: is called with messages about the progress.
        limit: the maximum size of the file in bytes.

    Returns:
        The recorded trace.

    Raises:
        ExportError: the file exists and `force` is False, or the folder of the file does not exist.
        RunFailure: the trace exceeds the limit, even without host operators.
        EnvironmentFailure: the file cannot be written.
    """
    if not out.parent.is_dir():
        raise ExportError(f"{out} is not the path of a file", "name a file in a folder that exists")
    require_replaceable(out, force)
    chosen = choose_target(spec, target)
    device = torch.device(device_of(TARGETS[chosen]))
    gpu = device.type == "cuda"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specc-profile-")))
        say("builds and compiles" if gpu else "builds")
        loaded = instantiate(spec, chosen, folder / "code", lock=lock)
        trainer = random_trainer(loaded, device, stack)
        for _ in range(WARM_UP):
            trainer.advance()
        trainer.settle()
        wait(device)
        say(f"records {steps} step{'s' * (steps > 1)}")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
        with recorder(activities=activities) as recorded:
            for _ in range(steps):
                trainer.advance()
            trainer.settle()
            wait(device)
        raw = folder / "trace.json"
        recorded.export_chrome_trace(str(raw))
        data: dict[str, Any] = json.loads(raw.read_text(encoding="utf-8"))
        if gpu:
            plan = plan_loaded(spec, None, (chosen,), lock).plans[chosen]
            kernels = read(data["traceEvents"], steps, generated_names(plan, loaded.directory)).kernels
            entries = [*kernels]
        else:
            entries = [
                Kernel("operator", each.key, each.self_cpu_time_total / 1e3 / steps, each.count / steps)
                for each in recorded.key_averages()
            ]
    entries.sort(key=lambda entry: (-entry.ms, entry.name))
    packed, whole = _packed(data, limit)
    write_atomically(out, [packed])
    return Trace(out, len(packed), whole, steps, chosen, sum(entry.ms for entry in entries), tuple(entries))


def _packed(data: dict[str, Any], limit: int) -> tuple[bytes, bool]:
    events = data["traceEvents"]
    for whole in (True, False):
        shown = events if whole else [event for event in events if event.get("cat") not in HOST]
        packed = gzip.compress(json.dumps({**data, "traceEvents": shown}).encode(), mtime=0)
        if len(packed) <= limit:
            return packed, whole
    raise RunFailure(f"the trace has {len(packed):,} bytes, more than {limit:,}", "record fewer steps with --steps")
