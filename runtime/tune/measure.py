"""Checks candidates on small inputs, and measures their times on inputs with the sizes of the spec."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specc.compiler.plan.plan import Choice
from specc.runtime.bench.timing import alternate
from specc.runtime.model.code_cache import GENERATED
from specc.runtime.tune.candidates import Candidate
from specc.runtime.tune.prepare import Prepared, loaded, prepare, short
from specc.runtime.verify.judge import Judge, inputs_of

CHECKED = {"B": 3, "T": 343, "S": 343}  # the sizes of small inputs; B * T is not a multiple of any tile size
REPEATS = 100


def refusal(judge: Judge, call: Callable[..., Any], deterministic: bool = True) -> str | None:
    """Returns the reason why a kernel must not be used. None if the kernel can be used.

    A kernel is rejected if it is less exact than plain Torch, or does not write all of its outputs. With
    `deterministic`, a kernel is also rejected if repeated calls return different bits.

    Args:
        judge: compares the outputs of the kernel with f64 references.
        call: the kernel.
        deterministic: whether repeated calls must return the same bits.
    """
    outputs = judge.call(call)
    for i, error in enumerate(judge.errors(outputs)):
        if not error.ok:
            return f"output {i} {error.words}"
    for _ in range(REPEATS if deterministic else 0):
        if not all(map(torch.equal, outputs, judge.call(call))):
            return "returns different bits when called again"
    return None


def forget(folder: Path) -> None:
    """Removes the imported modules of a folder, and the package that contains them, from `sys.modules`."""
    generated = [(name, module) for name, module in sys.modules.items() if name.startswith(GENERATED)]
    for name, module in generated:
        places = (getattr(module, "__file__", None) or "", *getattr(module, "__path__", ()))
        if any(str(place).startswith(str(folder.resolve())) for place in places):
            del sys.modules[name]


class Measurement:
    """The inputs of one node on a device, and the folders of its candidates.

    Args:
        choice: the node, and the kernel that the plan uses for the node.
        sizes: the sizes of the symbolic dimensions of the inputs for the timed calls.
        moved: the approximate number of bytes that a call reads and writes.
        folder: the folder that contains one folder per candidate.
        device: the device on which to measure.
    """

    def __init__(
        self, choice: Choice, sizes: Mapping[str, int], moved: int, folder: Path, device: torch.device
    ) -> None:
        self._site, self._rendered, self._device = choice.site, choice.rendered, device
        self._moved, self._folder = moved, folder
        small = Judge.of(choice.site, inputs_of(choice.site, choice.site.node.op.site_sizes(CHECKED), device, seed=1))
        self._judges = [judge for judge in (small, Judge.many(choice.site, device, seed=2)) if judge is not None]
        self._inputs = inputs_of(choice.site, sizes, device)

    def _place(self, candidate: Candidate) -> Path:
        folder = self._folder / candidate.digest
        if not folder.is_dir():
            folder.mkdir()
            for name, text in candidate.files.items():
                (folder / name).write_text(text, encoding="utf-8")
        return folder

    def prepared(self, listed: Sequence[Candidate]) -> Iterator[tuple[Candidate, Prepared | None]]:
        """Compiles the candidates, and yields a pair (candidate, failure) for each candidate.

        The failure is None if the candidate can be called. If the Python files of candidates differ only in constants,
        the candidates share a CUDA source, which is compiled once.
        """
        by_source: dict[object, list[Candidate]] = {}
        for candidate in listed:
            by_source.setdefault(candidate.source or candidate.digest, []).append(candidate)
        groups = list(by_source.values())
        folders = [(i, self._place(group[0])) for i, group in enumerate(groups)]
        for result in prepare(folders, self._rendered.module, self._rendered.function, self._site, self._device):
            failure = result if result.reason else None
            yield from ((candidate, failure) for candidate in groups[result.index])

    def _function(self, candidate: Candidate) -> Callable[..., Any]:
        return loaded(self._place(candidate), self._rendered.module, self._rendered.function)

    def first_time(self, candidate: Candidate) -> float | str:
        try:
            function = self._function(candidate)
            for judge in self._judges:
                if reason := refusal(judge, function, candidate.kernel.deterministic):
                    return reason
            return self.side_by_side([candidate])[candidate]
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a kernel may raise any exception; the search continues with the other kernels
            return short(f"{type(error).__name__}: {error}")
        finally:
            forget(self._place(candidate))

    def side_by_side(self, chosen: Sequence[Candidate]) -> dict[Candidate, float]:
        if not chosen:
            return {}
        calls = {str(i): partial(self._function(candidate), *self._inputs) for i, candidate in enumerate(chosen)}
        with torch.no_grad():
            times = alternate(calls, self._device, self._moved)
        return {candidate: times[str(i)].ms for i, candidate in enumerate(chosen)}
