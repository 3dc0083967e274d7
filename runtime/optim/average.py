"""The average of the weights over a run. The average becomes the final weights of the run."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from specc.compiler.spec.train import AverageSpec, EmaSpec
from specc.runtime.optim.schedule import Moment


class Average:
    """An f32 mean of the master weights, by name. Its initial value is a copy of the master weights.

    An `ema` is an exponential moving average: each update moves it 1 - `decay` of the way to the masters (Polyak and
    Juditsky, 1992). An `swa` is the plain mean of the masters, sampled once per `every` steps while the warm-down is
    below `below` (Izmailov et al., 2018).
    """

    def __init__(self, spec: AverageSpec, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        self._spec, self._weights = spec, weights
        self._tensors = {name: weight.detach().clone() for name, weight in weights().items()}
        self._count = torch.zeros(())  # the samples of an `swa`

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The current mean, without a copy. Before the first sample of an `swa`, it equals the current master
        weights."""
        if not self.begun:
            self._move(1.0)
        return self._tensors

    @property
    def begun(self) -> bool:
        """Whether the mean has a sample: always for an `ema`, and after the first sample for an `swa`."""
        return isinstance(self._spec, EmaSpec) or bool(self._count)

    def update(self, step: int, moment: Moment) -> None:
        """Updates the mean from the master weights after `step` updates, if an update of the mean is due. `moment` is
        the position of the run at the last update."""
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
        """Returns the number of samples of an `swa`, by name, without a copy; empty for an `ema`."""
        return {} if isinstance(self._spec, EmaSpec) else {"swa.count": self._count}

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Sets the mean to `weights`, which must have the names and shapes of the mean. Restores the number of samples
        from `state`, a result of the method `state`. Other names in `state` are ignored."""
        for name, tensor in self._tensors.items():
            tensor.copy_(weights[name])
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
