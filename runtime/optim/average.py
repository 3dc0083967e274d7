"""Averages of the weights over a run, used as its final weights."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from specc.compiler.spec.train import AverageSpec, EmaSpec, SwaSpec
from specc.runtime.optim.schedule import Moment


class Average(ABC):
    """An f32 mean of the masters, by name. Its initial value is a copy of the masters."""

    def __init__(self, masters: Mapping[str, Tensor]) -> None:
        self._masters = [master.detach() for master in masters.values()]
        self._tensors = {name: master.detach().clone() for name, master in masters.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The mean so far, not copied."""
        return self._tensors

    @property
    def begun(self) -> bool:
        """True once the mean includes masters. Before that, `tensors` are a copy of the masters."""
        return True

    @abstractmethod
    def update(self, step: int, moment: Moment) -> None:
        """Updates the mean from the masters after `step` updates, the last of which happened at `moment`."""

    def state(self) -> dict[str, Tensor]:
        """Returns the state in addition to the mean, by name, not copied."""
        return {}

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Copies `weights` into the mean and `state` into the state. Each must have the current names and shapes; other
        names in `state` are ignored."""
        for name, tensor in self._tensors.items():
            tensor.copy_(weights[name])
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


class Exponential(Average):
    """An exponential moving average: each update moves it 1 - `decay` of the way to the masters (Polyak and Juditsky,
    1992). Launches the same work every time."""

    def __init__(self, masters: Mapping[str, Tensor], decay: float) -> None:
        super().__init__(masters)
        self._decay = decay

    @torch.no_grad()
    def update(self, step: int, moment: Moment) -> None:
        torch._foreach_lerp_(list(self._tensors.values()), self._masters, 1 - self._decay)


class Uniform(Average):
    """The plain mean of the masters, sampled after every `every` steps while the warm-down is below `below` (SWA,
    Izmailov et al. 2018). Before the first sample, `tensors` are the masters themselves."""

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
    """Returns the average that a spec defines."""
    match spec:
        case EmaSpec():
            return Exponential(masters, spec.decay)
        case SwaSpec():
            return Uniform(masters, spec.every, spec.below)
