"""Measures optimizer updates: the whole update of a training step, the share of each optimizer of the spec in this
update, and an update by Torch's AdamW.

Several consecutive updates are timed together, and the time is divided by the number of updates. This average includes
work that only some updates do. Torch's AdamW updates all parameters in f32. It is measured in three forms: fused, with
multi-tensor kernels, and in a loop over the parameters.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from specc.compiler.passes.optimizers import owners
from specc.runtime.bench.ceilings import Ceilings, Work
from specc.runtime.bench.environment import Setup
from specc.runtime.bench.step import WARM_UP, advance, random_trainer, release
from specc.runtime.bench.timing import Measured, wait
from specc.runtime.model.cuda_graph import Captured
from specc.runtime.model.load import instantiate
from specc.runtime.optim.optimizers import Optimizers
from specc.runtime.optim.schedule import Moment, moment
from specc.runtime.train.trainer import Trainer

TRAINED = "as trained"
TORCH = {  # the values of the arguments `fused` and `foreach` for each form
    "torch AdamW, fused": (True, False),
    "torch AdamW, foreach": (False, True),
    "torch AdamW, a loop": (False, False),
}
# The number of consecutive updates per sample. Rare work, such as a new basis, then occurs several times in a sample.
UPDATES = 20
SECONDS = 0.5  # the duration in seconds of the samples of a pass
MOST = 20  # the maximum number of samples per pass


@dataclass(frozen=True, slots=True)
class UpdateRow:
    """The measurement of one kind of update.

    Attributes:
        name: the name of the update. For an entry of `train.optimizers`, the name consists of the kind and the pattern
            of parameter names.
        tensors: the number of parameters that are updated.
        numbers: the total number of elements of these parameters.
        update: the time of an update.
        floor_ms: the minimum time in ms, at the peak memory rate: weights, gradients and optimizer state are read once,
            and weights and state are written once.
    """

    name: str
    tensors: int
    numbers: int
    update: Measured
    floor_ms: float

    @property
    def share_of_floor(self) -> float:
        return self.floor_ms / self.update.ms


@dataclass(frozen=True, slots=True)
class Updates:
    """The measurements of all updates, and the time of a whole training step."""

    rows: tuple[UpdateRow, ...]
    step: Measured

    def of_step(self, row: UpdateRow) -> float:
        return row.update.ms / self.step.ms

    def over_fused(self, row: UpdateRow) -> float:
        """Returns the time of the update in `row`, divided by the time of an update with Torch's fused AdamW."""
        fused = next(row for row in self.rows if row.name in TORCH)
        return row.update.ms / fused.update.ms


def measure(setup: Setup, ceilings: Ceilings, steps: int) -> Updates:
    """Measures a training step, its optimizer update, the share of each entry of `train.optimizers` in the update, and
    an update with Torch's AdamW.

    Args:
        setup: the setup of the benchmark.
        ceilings: the peak rates of the device, from which minimum times are computed.
        steps: the number of training steps to time.

    Returns:
        One row per kind of update, and the time of a training step.

    Raises:
        RunFailure: if a loss is not finite.
    """
    setup.say("optimizer: builds, and trains")
    rows: list[UpdateRow] = []
    with ExitStack() as stack:
        loaded = instantiate(setup.spec, setup.target, setup.folder / "optimizer", lock=setup.lock)
        trainer = random_trainer(loaded, setup.device, stack)
        advance(trainer, WARM_UP)
        half = -(-steps // 2)
        step = Measured.of(*([advance(trainer, half)[0]] for _ in range(2)))
        values = {name: master.detach().cpu() for name, master in trainer.masters.weights().items()}
        for row in (_trained(setup, ceilings, trainer), *_others(setup, ceilings, values)):
            setup.say(f"  {row.name}: {row.update.ms:.4g} ms, {row.update.ms / step.ms:.2%} of a step")
            rows.append(row)
    release(setup.device)
    return Updates(tuple(rows), step)


def _trained(setup: Setup, ceilings: Ceilings, trainer: Trainer) -> UpdateRow:
    masters, average = trainer.masters, trainer.average
    # An update reads the f32 master weights, or the bf16 parameters if there are no master weights
    read = sum(weight.nbytes for weight in masters.model_parameters.values())
    copies = 0
    if trainer.train.precision.masters == "f32":
        copies = sum(p.nbytes for name, p in masters.model_parameters.items() if p is not masters.tensors[name])
        read = sum(master.nbytes for master in masters.tensors.values())
    state = [*trainer.optimizers.state().values(), *(average.tensors.values() if average is not None else ())]
    stored = sum(tensor.nbytes for tensor in state)
    gradients = sum(gradient.nbytes for gradient in masters.gradients)
    work = Work(0, 2 * (read + stored) + gradients + copies, read + stored + copies)

    def update(step: int) -> None:
        trainer.update(moment(trainer.train, trainer.step + step, trainer.clock.common))

    return _row(setup, ceilings, TRAINED, masters.model_parameters, work, update)


def _others(setup: Setup, ceilings: Ceilings, values: Mapping[str, Tensor]) -> Iterator[UpdateRow]:
    specs = setup.spec.train.optimizers
    owner = owners(specs, {name: tuple(value.shape) for name, value in values.items()})
    for i, spec in enumerate(specs if len(specs) > 1 else ()):
        group = {name: value for name, value in values.items() if owner[name] == i}
        if group:
            masters = _masters(setup, group)
            optimizers = Optimizers(masters, (spec,))
            update = _entry(optimizers, setup.device)
            work = _work(masters, optimizers.state().values())
            yield _row(setup, ceilings, f"{spec.kind} {spec.match}", masters, work, update)
    for name in TORCH:
        masters = _masters(setup, values)
        adamw = torch_adamw(name, masters.values())
        adamw.step()  # the first update creates the state
        state = (tensor for slots in adamw.state.values() for tensor in slots.values())
        yield _row(setup, ceilings, name, masters, _work(masters, state), partial(_step, adamw))


def torch_adamw(name: str, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Returns Torch's AdamW for `parameters`. `name` is a key of TORCH, which selects the form: fused, multi-tensor, or
    a loop.
    """
    fused, foreach = TORCH[name]
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, fused=fused, foreach=foreach)


def _step(adamw: torch.optim.Optimizer, step: int) -> None:
    adamw.step()


def _masters(setup: Setup, values: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    generator = torch.Generator(setup.device).manual_seed(setup.spec.train.seed)
    masters = {name: nn.Parameter(value.to(setup.device, copy=True)) for name, value in values.items()}
    for master in masters.values():
        master.grad = 0.01 * torch.randn(master.shape, generator=generator, device=setup.device)
    return masters


def _entry(optimizers: Optimizers, device: torch.device) -> Callable[[int], None]:
    functions: dict[tuple[str, ...], Callable[[], None]] = {}

    def update(step: int) -> None:
        work = optimizers.work(step)
        if work not in functions:
            function = partial(optimizers.update, work)
            captured = device.type == "cuda" and not optimizers.waits(work)
            functions[work] = Captured(function) if captured else function
        optimizers.set(Moment(multiplier=0.01, step=step))
        functions[work]()

    return update


def _work(masters: Mapping[str, nn.Parameter], state: Iterable[Tensor]) -> Work:
    weights, stored = (sum(tensor.nbytes for tensor in tensors) for tensors in (masters.values(), state))
    return Work(0, 3 * weights + 2 * stored, weights + stored)


def _row(
    setup: Setup,
    ceilings: Ceilings,
    name: str,
    parameters: Mapping[str, Tensor],
    work: Work,
    update: Callable[[int], None],
) -> UpdateRow:
    numbers = sum(parameter.numel() for parameter in parameters.values())
    measured = Measured.of(*_passes(setup.device, update))
    return UpdateRow(name, len(parameters), numbers, measured, ceilings.floor_ms(work))


def _passes(device: torch.device, update: Callable[[int], None]) -> tuple[list[float], list[float]]:
    step = 0

    def sample() -> float:
        nonlocal step
        wait(device)
        began = time.perf_counter()
        for _ in range(UPDATES):
            update(step)
            step += 1
        wait(device)
        return 1e3 * (time.perf_counter() - began) / UPDATES

    sample()
    count = max(1, min(MOST, int(SECONDS / (1e-3 * UPDATES * sample()))))
    first, second = ([sample() for _ in range(count)] for _ in range(2))
    return first, second
