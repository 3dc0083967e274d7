"""Advice after a GPU ran out of memory: the smallest change of the spec that should fit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from specc.compiler import pipeline
from specc.compiler.changing_values import values_of
from specc.compiler.passes.recompute import recomputable_parts
from specc.compiler.plan.lock import Lock
from specc.compiler.programs.programs import LoweringError
from specc.compiler.report.step import Step, step_of
from specc.compiler.spec.spec import Spec
from specc.compiler.spec.train import BLOCK
from specc.runtime.errors import RunFailure

GENERAL = "lower train.micro_batch; the size of a step need not change"
MARGIN = 1.03  # some free memory is unusable, because the free parts of the allocator's segments are too small
Change = tuple[str, Step]


@dataclass(frozen=True, slots=True)
class Advice:
    """Computes the hint for the user after a run needed more memory than its GPU has.

    Attributes:
        spec: the spec of the run.
        target: the target of the run.
        lock: the kernels that `specc tune` measured as the fastest.
        processes: the number of processes that train together.
        place: the position of the section `train` in the spec, as `file:line`; empty if the position is unknown.
    """

    spec: Spec
    target: str
    lock: Lock
    processes: int = 1
    place: str = ""

    def hint(self, capacity: int) -> str:
        """Returns a hint with the smallest changes of the spec that fit in `capacity` bytes.

        A change reduces the rows per micro-batch, recomputes a part of the model in the backward pass, or both. The
        unchanged run ran out of memory, so it needs at least `capacity` bytes. If the estimate for the unchanged run is
        below `capacity`, the method scales up all estimates by the same factor.
        """
        rows = self.spec.train.at_once(self.processes)
        needed = self._step(rows).memory.total
        factor = MARGIN * max(1.0, capacity / needed)

        def fits(change: Change) -> bool:
            return factor * change[1].memory.total <= capacity

        of, limit = f"of {capacity / 1e9:.1f} GB", f"{self.place}: " if self.place else ""
        fewer = next(filter(fits, self._fewer_rows(rows)), None)
        again = min(filter(fits, self._recomputed(rows)), key=lambda change: change[1].expected_ms, default=None)
        both = None if fewer or again else next(filter(fits, self._fewer_rows(rows, (BLOCK,))), None)
        changes = [change for change in (fewer, again, both) if change is not None]
        if not changes:
            least = min(step.memory.total for _, step in self._fewer_rows(rows + 1, (BLOCK,)))
            message = f"no micro_batch and no recompute fits: the forecast is at least {factor * least / 1e9:.1f} {of}"
            return f"{limit}{message}; use a smaller model, or a GPU with more memory"
        words = " or ".join(f"{text} ({factor * step.memory.total / 1e9:.1f} {of})" for text, step in changes)
        return f"{limit}{words} fits according to the forecast; the size of a step need not change"

    def _step(self, rows: int, recompute: tuple[str, ...] | None = None) -> Step:
        parts = self.spec.train.recompute if recompute is None else recompute
        train = self.spec.train.model_copy(update={"micro_batch": rows, "recompute": parts})
        spec = self.spec.model_copy(update={"train": train})
        return step_of(spec, pipeline.plan(spec, self.target, "", self.lock))

    def _fewer_rows(self, rows: int, recompute: tuple[str, ...] | None = None) -> Iterator[Change]:
        train, window = self.spec.train, self.spec.model.window
        sizes = [size if train.batch is not None else size // window for _, size in values_of("", train.step_size)]
        for fewer in range(rows - 1, 0, -1):
            if not any(size % (fewer * self.processes) for size in sizes):
                more = f" and train.recompute: [{', '.join(recompute)}]" if recompute else ""
                try:
                    yield f"train.micro_batch: {fewer} instead of {rows}{more}", self._step(fewer, recompute)
                except LoweringError:
                    return

    def _recomputed(self, rows: int) -> Iterator[Change]:
        parts = recomputable_parts(pipeline.lower(self.spec, self.target))
        for option in (*((part,) for part in parts), parts, (BLOCK,)):
            names = tuple(dict.fromkeys((*self.spec.train.recompute, *option))) if option != (BLOCK,) else option
            if names and names != self.spec.train.recompute and BLOCK not in self.spec.train.recompute:
                try:
                    yield f"train.recompute: [{', '.join(names)}]", self._step(rows, names)
                except LoweringError:
                    continue


def capacity_of(device: torch.device) -> int:
    """Returns the number of bytes that the tensors of this process may occupy on a GPU.

    The number includes the bytes that the tensors already occupy.
    """
    free, total = torch.cuda.mem_get_info(device)
    # `get_per_process_memory_fraction` requires the index of the device
    limit = torch.cuda.get_per_process_memory_fraction(device.index) * total
    return int(min(free + torch.cuda.memory_reserved(device), limit))


@contextmanager
def out_of_memory_named(when: str, hint: Callable[[], str]) -> Iterator[None]:
    """A context manager that raises RunFailure with a hint if a GPU runs out of memory. `when` begins the message."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunFailure(f"{when}: out of GPU memory", hint()) from error
