"""Averages of the weights over a run, which end up in their place."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from specc.compiler.spec.train import AverageSpec, EmaSpec, SwaSpec
from specc.runtime.optim.schedule import Moment


class Average(ABC):
    """An f32 mean of the masters, by name. It starts at the weights it is made with."""

    def __init__(self, masters: Mapping[str, Tensor]) -> None:
        self._masters = [master.detach() for master in masters.values()]
        self._tensors = {name: master.detach().clone() for name, master in masters.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The mean so far, not copied."""
        return self._tensors

    @property
    def begun(self) -> bool:
        """Whether it is a mean of anything yet."""
        return True

    @abstractmethod
    def update(self, step: int, moment: Moment) -> None:
        """Takes note of the masters after `step` updates, the last of which was made at `moment`."""

    def state(self) -> dict[str, Tensor]:
        """Its state besides the mean, not copied, by name."""
        return {}

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Copies `weights` over the mean and `state` over its state; each must have the names and shapes that it has.
        Of `state` other names are left alone."""
        for name, tensor in self._tensors.items():
            tensor.copy_(weights[name])
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


class Exponential(Average):
    """Moves 1 - `decay` of the way to the masters in each update (Polyak and Juditsky, 1992). Launches the same work
    every time."""

    def __init__(self, masters: Mapping[str, Tensor], decay: float) -> None:
        super().__init__(masters)
        self._decay = decay

    @torch.no_grad()
    def update(self, step: int, moment: Moment) -> None:
        torch._foreach_lerp_(list(self._tensors.values()), self._masters, 1 - self._decay)


class Uniform(Average):
    """The plain mean of the masters after every `every` steps with a warm-down below `below` (SWA, Izmailov et al.
    2018); before the first of them, the masters themselves."""

    def __init__(self, masters: Mapping[str, Tensor], every: int, below: float) -> None:
        super().__init__(masters)
        self._every, self._below = every, below
        self._count = torch.zeros(())

    @property
    def tensors(self) -> dict[str, Tensor]:
        if not self.begun:
            self._take(1.0)
        return self._tensors

    @property
    def begun(self) -> bool:
        return bool(self._count)

    def update(self, step: int, moment: Moment) -> None:
        if step % self._every == 0 and moment.warm_down < self._below:
            self._count += 1
            self._take(1 / float(self._count))

    @torch.no_grad()
    def _take(self, share: float) -> None:
        torch._foreach_lerp_(list(self._tensors.values()), self._masters, share)

    def state(self) -> dict[str, Tensor]:
        return {"swa.count": self._count}


def averaging(spec: AverageSpec, masters: Mapping[str, Tensor]) -> Average:
    """The average that a spec asks for."""
    match spec:
        case EmaSpec():
            return Exponential(masters, spec.decay)
        case SwaSpec():
            return Uniform(masters, spec.every, spec.below)
