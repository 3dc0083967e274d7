"""The average of the weights over a run. At the end of the run, the average replaces the weights."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from specc.compiler.spec.train import AverageSpec, EmaSpec
from specc.runtime.optim.schedule import Moment


class Average:
    """An f32 mean of the master weights, by name. The mean starts as a copy of the master weights.

    The kind `ema` is an exponential moving average with the factor `decay` (Polyak and Juditsky, 1992). The kind `swa`
    is an arithmetic mean of samples of the weights (Izmailov et al., 2018). It takes a sample every `every` steps,
    while `Moment.warm_down` is less than `below`.
    """

    def __init__(self, spec: AverageSpec, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        self._spec, self._weights = spec, weights
        self._tensors = {name: weight.detach().clone() for name, weight in weights().items()}
        self._count = torch.zeros(())  # the number of samples of an `swa`

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The current mean of each weight, by name. The tensors are not copies.

        Before the first sample of an `swa`, the tensors are the current master weights.
        """
        if not self.begun:
            self._move(1.0)
        return self._tensors

    @property
    def begun(self) -> bool:
        """Whether the mean has a sample. An `ema` always has a sample."""
        return isinstance(self._spec, EmaSpec) or bool(self._count)

    def update(self, step: int, moment: Moment) -> None:
        """Updates the mean after step `step`. An `swa` changes only in the steps in which it takes a sample.

        `moment` is the progress of the run at the step.
        """
        if isinstance(self._spec, EmaSpec):
            self._move(1 - self._spec.decay)
        elif step % self._spec.every == 0 and moment.warm_down < self._spec.below:
            self._count += 1
            self._move(1 / float(self._count))

    @torch.no_grad()
    def _move(self, share: float) -> None:
        weights = self._weights()
        torch._foreach_lerp_(list(self._tensors.values()), [weights[name] for name in self._tensors], share)

    def state(self) -> dict[str, Tensor]:
        """Returns the state for a checkpoint, without copies of tensors.

        The state of an `swa` contains the number of samples. The state of an `ema` is empty.
        """
        return {} if isinstance(self._spec, EmaSpec) else {"swa.count": self._count}

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Sets the mean to `weights`, and the number of samples from `state`.

        `weights` must have the names and shapes of the mean. `state` must contain the entries that the method `state`
        returns. Other entries of `state` are ignored.
        """
        for name, tensor in self._tensors.items():
            tensor.copy_(weights[name])
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
