"""The phases of a run: which programs a model trains with and is scored with, and on rows of how many tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from specc.compiler.programs.programs import Phase

LAST = Phase(1.0, "train", "score")
Function = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a run with one pair of programs and one length of rows: it begins when the share `begins` is done."""

    begins: float
    phase: Phase
    tokens: int

    @property
    def words(self) -> str:
        """For people."""
        return f"program {self.phase.train}, rows of {self.tokens:,} tokens"


def stretches(phases: Sequence[Phase], lengths: Sequence[tuple[float, int]], window: int) -> tuple[Stretch, ...]:
    """The stretches of a run, in order. Behind `phases` it goes on with LAST. `lengths` are (share done, tokens of a
    row from there), in order and from 0; `window` tokens where there are none."""
    ends = (0.0, *(phase.until for phase in phases), 1.0)
    lengths = lengths or ((0.0, window),)
    found = []
    for begins in sorted({*(end for end in ends if end < 1), *(when for when, _ in lengths)}):
        phase = next(one for one, (_, end) in zip((*phases, LAST), pairwise(ends), strict=True) if begins < end)
        found.append(Stretch(begins, phase, next(tokens for when, tokens in reversed(lengths) if when <= begins)))
    return tuple(found)


def current(run: Sequence[Stretch], done: float) -> int:
    """The number of the stretch in which an update is made when the share `done` of the run is behind."""
    return max(i for i, stretch in enumerate(run) if stretch.begins <= done)


def compiled_functions(model: nn.Module, run: Sequence[Stretch], compiled: bool) -> Mapping[str, Function]:
    """The programs of all stretches, by name: the mean loss of what the feed makes of a batch, and the loss of each
    target. Where rows change their length, each length is compiled for itself."""
    names = dict.fromkeys(name for one in run for name in (one.phase.train, one.phase.score))
    functions: dict[str, Function] = {name: model if name == LAST.train else getattr(model, name) for name in names}
    if not compiled:
        return functions
    whole = getattr(model, "fullgraph", True)  # else it says itself what is compiled of a loop over time
    sizes = {"dynamic": False} if len({one.tokens for one in run}) > 1 else {}
    trains = {one.phase.train for one in run}
    return {
        name: torch.compile(function, fullgraph=whole, **(sizes if name in trains else {}))  # type: ignore[call-overload]
        for name, function in functions.items()
    }


class Resting:
    """Parameters that no program of a phase reads. An update would decay them and count a step of theirs; `undo` takes
    that back."""

    def __init__(self, names: Sequence[str], masters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        resting = set(names)
        self._tensors = [masters[name].detach() for name in names]
        self._tensors += [tensor for key, tensor in state.items() if key.partition("/")[2] in resting]
        self._kept = [tensor.clone() for tensor in self._tensors]

    @torch.no_grad()
    def keep(self) -> None:
        """Takes them as they are now for what they rest at."""
        for tensor, kept in zip(self._tensors, self._kept, strict=True):
            kept.copy_(tensor)

    @torch.no_grad()
    def undo(self) -> None:
        """Takes an update back."""
        for tensor, kept in zip(self._tensors, self._kept, strict=True):
            tensor.copy_(kept)
