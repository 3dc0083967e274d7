"""The segments of a run: consecutive parts that differ in the program, the row length, or the size of a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from specc.compiler.changing_values import points_of
from specc.compiler.programs.programs import Phase
from specc.compiler.spec.train import TrainSpec
from specc.runtime.train.recompute_order import in_order
from specc.runtime.train.sources.micro_batches import micro_batches

LAST = Phase(1.0, "train", "score")
Function = Callable[..., Tensor]
Compile = Callable[..., Function]  # has the arguments and the result of torch.compile
# Torch 2.11 pads rows of more than 1,024 elements, and gradients of FlexAttention with sinks then read wrong elements
UNPADDED: Mapping[str, bool] = {"comprehensive_padding": False}


@dataclass(frozen=True, slots=True)
class RunSegment:
    """A part of a run with fixed programs, row length and step size.

    Attributes:
        begins: the completed fraction of the run, from 0 to 1, at which the segment begins.
        phase: the phase of the spec, which selects the programs for training and scoring.
        tokens: the length of a row, in tokens.
        micro_batches: the number of backward passes per step on each process.
    """

    begins: float
    phase: Phase
    tokens: int
    micro_batches: int = 1

    @property
    def description(self) -> str:
        passes = f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}"
        return f"program {self.phase.train}, rows of {self.tokens:,} tokens, {passes} per step"


def run_segments(phases: Sequence[Phase], train: TrainSpec, window: int, world: int = 1) -> tuple[RunSegment, ...]:
    """Returns the segments of a run, in order. A new segment begins wherever the phase or a scheduled size changes.

    Args:
        phases: all phases of the run except the last phase, in order.
        train: the section `train` of the spec.
        window: the context of the model in tokens. The row length is `train.context`, or `window` if that setting is
            unset.
        world: the number of processes.

    Raises:
        BatchError: if a step cannot be divided into micro-batches.
    """
    ends = (0.0, *(phase.until for phase in phases), 1.0)
    tokens, sizes = points_of(train.context or window), points_of(train.step_size)
    segments = []
    for begins in sorted({*(end for end in ends if end < 1), *(share for share, _ in (*tokens, *sizes))}):
        phase = next(phase for phase, (_, end) in zip((*phases, LAST), pairwise(ends), strict=True) if begins < end)
        row, size = (next(value for share, value in reversed(points) if share <= begins) for points in (tokens, sizes))
        segments.append(RunSegment(begins, phase, row, micro_batches(train, window, world, size)))
    return tuple(segments)


def segment_at(segments: Sequence[RunSegment], done: float) -> int:
    return max(i for i, segment in enumerate(segments) if segment.begins <= done)


def compiled_functions(
    model: nn.Module, segments: Sequence[RunSegment], compiled: bool, compile_training: Compile = torch.compile
) -> Mapping[str, Function]:
    """Returns the programs of all segments, by name.

    Training programs return the mean loss of a batch. Scoring programs return the loss of each target.

    Args:
        model: the model.
        segments: the segments of the run.
        compiled: whether to compile the programs.
        compile_training: the function that compiles the training programs.
    """
    names = dict.fromkeys(name for segment in segments for name in (segment.phase.train, segment.phase.score))
    functions: dict[str, Function] = {name: model if name == LAST.train else getattr(model, name) for name in names}
    if not compiled:
        return functions
    # A generated model with a loop over time compiles its parts itself, so that `fullgraph` is False
    whole = getattr(model, "fullgraph", True)
    sizes = {"dynamic": False} if len({segment.tokens for segment in segments}) > 1 else {}
    trains = {segment.phase.train for segment in segments}
    return {
        name: compile_training(function, fullgraph=whole, options={**in_order(), **UNPADDED}, **sizes)
        if name in trains
        else torch.compile(function, fullgraph=whole)
        for name, function in functions.items()
    }


class UnusedParameters:
    """Prevents optimizers from changing parameters that no program of a phase reads.

    Without this protection, an optimizer would apply weight decay to these parameters and advance their step counts.
    The method `save` stores the parameters and their optimizer state. The method `restore` writes the stored values
    back. During each call, `masters` must contain the f32 weights.

    Args:
        names: the names of the parameters.
        masters: the f32 master weights, by name.
        state: the state of the optimizers, with the keys of `Optimizers.state`.
    """

    def __init__(self, names: Sequence[str], masters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        unused = set(names)
        self._tensors = [masters[name] for name in names]
        self._tensors += [tensor for key, tensor in state.items() if key.partition("/")[2] in unused]
        self._saved = [tensor.detach().clone() for tensor in self._tensors]

    @torch.no_grad()
    def save(self) -> None:
        for tensor, saved in zip(self._tensors, self._saved, strict=True):
            saved.copy_(tensor)

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, saved in zip(self._tensors, self._saved, strict=True):
            tensor.copy_(saved)
