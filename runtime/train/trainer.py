"""Trains one model: gradients of micro-batches, one update, its state out and in again."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specc.compiler.programs.programs import Parameter, Phase
from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.train import TrainSpec
from specc.runtime.calibration.input_scales import InputScales
from specc.runtime.distributed.world import World
from specc.runtime.dtypes import DTYPES
from specc.runtime.errors import IntegrityError, RunFailure
from specc.runtime.log import Step
from specc.runtime.metrics.share import Share, Sums
from specc.runtime.metrics.validation import Measured, Scorer, Validates
from specc.runtime.model.cuda_graph import Captured
from specc.runtime.optim import schedule
from specc.runtime.optim.average import averaging
from specc.runtime.optim.masters import Masters
from specc.runtime.optim.optimizers import Optimizers, sharded_parameters
from specc.runtime.optim.reduce import mean_gradients
from specc.runtime.storage.checkpoint import Snapshot, require_match
from specc.runtime.train.clock import Clock
from specc.runtime.train.phases import Function, Resting, Stretch, compiled_functions, current, stretches
from specc.runtime.train.precision import products_in_tf32
from specc.runtime.train.sources.feed import Batch, Batches, Feed, Windows
from specc.runtime.train.sources.micro_batches import micro_batches

WARM_UP_STEPS = 3
_NOT_FINITE = "the last checkpoint is kept; lower the learning rates, or set train.clip_norm"


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose numbers may still be on their way from the device."""

    step: int
    multiplier: float
    numbers: Tensor  # f32 [2]: loss, gradient norm
    arrived: torch.cuda.Event | None
    counted: tuple[int | None, int]  # samples and tokens given so far, these included


class Trainer:
    """One model in training. It moves to `device`, and its parameters to the dtypes that `parameters` state.

    The model gives a mean loss in nats, f32 [], of what `feed` makes of a batch; for windows of text, the default,
    that is `model(ids, targets)`, i64 [B, T]. `model.score` gives the nats of each target, [B, T].

    In a `world` of several processes each has a trainer, all make the same calls, and `loader` gives each its
    part of a step's rows. Gradients and losses are summed once a step; of Muon's matrices each rank orthogonalizes
    some, and all else it computes for itself. `grids` says how each parameter will be stored, for `train.qat`, and
    `inputs` by which scales int8 products will read their inputs; `phases` are as of `Programs`.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Parameter],
        train: TrainSpec,
        loader: Batches,
        window: int,
        device: torch.device,
        compiled: bool,
        spec_digest: str,
        world: World | None = None,
        feed: Feed | None = None,
        grids: Mapping[str, Scheme] | None = None,
        phases: Sequence[Phase] = (),
        inputs: "InputScales | None" = None,
    ) -> None:
        self.train, self.loader, self.window = train, loader, window
        self.device, self.compiled = device, compiled
        self.world = world or World.alone()
        self.micro_batches = micro_batches(train, window, self.world.size)
        self.feed = feed or Windows(train.rows(window) * window)
        model.to(device)
        self._model = model
        shapes = {param.name: param.shape for param in parameters}
        apart = sharded_parameters(shapes, train.optimizers) if self.world.size > 1 else frozenset[str]()
        dtypes = {param.name: DTYPES[param.dtype] for param in parameters}
        self._grids, self._inputs = grids if train.qat is not None else None, inputs
        rounded = [name for name, scheme in (self._grids or {}).items() if scheme.has_grid]
        self.masters = Masters(model, dtypes, apart, rounded)
        self.optimizers = Optimizers(self.masters.tensors, train.optimizers, self.world)
        self.average = averaging(train.average, self.masters.tensors) if train.average else None
        self._norm = torch.zeros((), device=device)
        self._finish = self._replayed(self._clip, alone=True)
        self._run = stretches(phases, train.lengths or (), window)
        state, rests = self.optimizers.state(), dict.fromkeys(one.phase.rests for one in self._run)
        self._resting = {names: Resting(names, self.masters.tensors, state) for names in rests}
        self._moves = self._updates()
        self._functions = compiled_functions(model, self._run, compiled)
        pool = torch.cuda.graph_pool_handle() if device.type == "cuda" and compiled and len(self._run) > 1 else None
        works = [partial(self._add, self._functions[one.phase.train], one.tokens) for one in self._run]
        self._passes = [self._replayed(work, pool=pool) for work in works]
        self._begun = 0.0
        self._enter(0)
        self._spec_digest = spec_digest
        self.step = 0
        self.clock = Clock()
        self._launched: deque[_Launched] = deque()
        self._last_seconds = 0.0
        self._last_tokens, self._last_samples = 0, 0

    @property
    def stretch(self) -> Stretch:
        """What the last update trained with, or before the first what it will."""
        return self._run[self._number]

    @property
    def rounds(self) -> bool:
        """Whether the model computes with rounded weights by now."""
        return self.masters.rounds

    @property
    def measures(self) -> bool:
        """Whether the coming update begins with measuring what int8 products read."""
        moment = schedule.moment(self.train, self.step, self.clock.common)
        begins = self._begins(moment, current(self._run, moment.done))
        return begins and self._inputs is not None and not self._inputs.measured

    @property
    def coming(self) -> int:
        """How many other stretches of the run come after it."""
        return len(self._run) - 1 - self._number

    @property
    def done(self) -> float:
        """The share of the run that is done; at 1 it ends."""
        return schedule.progress(self.train, self.step, self.clock.common)

    def advance(self) -> list[Step]:
        """Makes one update; returns the steps whose numbers are known by now: on the CPU this one, on a GPU
        the one before, so that the device never waits.

        Raises RunFailure when loss or gradients of one of them are not finite. On the CPU the weights are
        then those from before the step.
        """
        moment = schedule.moment(self.train, self.step, self.clock.common)
        number = current(self._run, moment.done)
        self._round(moment, number)
        if number != self._number:
            self._enter(number)
        self._begun = moment.done
        self._gradients(self._arguments(self.loader.next() for _ in range(self.micro_batches)))
        norm = self._sum_up()
        self._launch(moment.multiplier, torch.stack((self.masters.loss, norm)))
        known = self._known(lag=1 if self.device.type == "cuda" else 0)
        self._update(moment)
        self.step += 1
        return known

    def settle(self) -> list[Step]:
        """Waits for the device; returns the steps that `advance` has not, and raises what it would raise."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._known(lag=0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock. `settle` first, or work still on the device will not be counted."""
        self.clock.stop()
        yield
        self.clock.start()
        self._last_seconds = self.clock.seconds

    def warm_up(self, vocabulary: int) -> None:
        """Compiles everything that a step runs, in this phase of the run and in those to come, by steps on made-up
        tokens; then all is as it was."""
        before = self.snapshot().copied()
        generator = torch.Generator().manual_seed(0)
        shape = (self.train.at_once(self.world.size), self.window)
        for number in [number for number in range(self._number, len(self._run)) for _ in range(WARM_UP_STEPS)]:
            self._enter(number)
            made = (self.feed.made_up(shape, vocabulary, generator) for _ in range(self.micro_batches))
            self._gradients(self._arguments(made))
            self.world.wait()  # however long another compiles, a sum on the device must not time out
            self._sum_up()
            self._update(schedule.Moment())
        self.restore(before)

    def evaluate(
        self,
        validation: Validates,
        weights: Mapping[str, Tensor] | None = None,
        progress: Callable[[int, int], None] | None = None,
        meet: Callable[[], None] | None = None,
    ) -> Measured:
        """Scores what `validation` holds, with `weights`, or else the model as it stands.

        Each rank of the world scores a part. `progress` is called between batches, `meet` when this rank's
        part is done, before the sums are. Raises RunFailure when the loss is not finite.
        """

        def reduce(sums: Sums) -> Sums:
            if meet is not None:
                meet()
            return self.world.totals(sums)

        with self.masters.showing(weights) if weights is not None else nullcontext():
            result = validation.measure(
                Scorer(
                    self._model,
                    self._functions[self.stretch.phase.score],
                    self.window,
                    self.device,
                    Share(self.world.rank, self.world.size, reduce),
                    progress,
                    self.compiled,
                )
            )
        if not math.isfinite(result.nats):
            raise RunFailure(f"step {self.step}: the validation loss is {result.nats}", _NOT_FINITE)
        return result

    def totals(self) -> dict[str, float]:
        """Where steps are counted in samples: how many the run has trained on by now, their tokens, and both a second
        of training, of these totals; else nothing."""
        samples, tokens = self.feed.counted()
        if samples is None:
            return {}
        seconds = max(self.clock.seconds, 1e-9)
        rates = {"samples_per_second": samples / seconds, "tokens_per_second": tokens / seconds}
        return {"samples": samples, "tokens": tokens, **rates}

    def require_same(self) -> None:
        """Raises RunFailure on a rank whose weights are not those of rank 0."""
        if self.world.size > 1:
            self.world.require_same("weight", self.masters.digests())

    def gather(self) -> None:
        """Makes the state whole on every rank, for one of them to save it; all must call it."""
        self.optimizers.gather()

    def snapshot(self) -> Snapshot:
        """The whole state between two steps; tensors are the trainer's own, not copies. In a world of several, what
        other ranks keep of the optimizers' state is out of date until `gather`."""
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        return Snapshot(
            self.step,
            self.clock.seconds,
            self.masters.tensors,
            self.average.tensors if self.average is not None else None,
            {k: t for one in (self.optimizers, self.average, self._inputs) if one for k, t in one.state().items()},
            rng,
            self.loader.state(),
            self._spec_digest,
            self._begun,
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Goes on from `snapshot`. Raises IntegrityError, and changes nothing, if it is of another model."""
        own = self.snapshot()
        if snapshot.spec_digest != self._spec_digest:
            raise IntegrityError("the checkpoint is of another spec", "resume with the spec of the run")
        require_match("the checkpoint's model", snapshot.weights, own.weights)
        require_match("the checkpoint's optimizer", snapshot.optimizer, own.optimizer)
        require_match("the checkpoint's average", snapshot.average or {}, own.average or {})
        require_match("the checkpoint's generators", snapshot.rng, own.rng)
        self.loader.restore(snapshot.loader)
        self._round_to(None)
        self.masters.restore(snapshot.weights)
        self.optimizers.restore(snapshot.optimizer)
        if self._inputs is not None:
            self._inputs.restore(snapshot.optimizer)
        if self.average is not None and snapshot.average is not None:
            self.average.restore(snapshot.average, snapshot.optimizer)
        torch.set_rng_state(snapshot.rng["cpu"])
        if "cuda" in snapshot.rng:
            torch.cuda.set_rng_state(snapshot.rng["cuda"], self.device)
        self._begun = snapshot.done
        self._enter(current(self._run, snapshot.done))
        self.step = snapshot.step
        self.clock.set(snapshot.seconds)
        if self.step:
            self._round(schedule.moment(self.train, self.step - 1, self.clock.common), self._number)
        self._last_seconds = snapshot.seconds
        samples, self._last_tokens = self.feed.counted()
        self._last_samples = samples or 0
        self._launched.clear()

    def _arguments(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """What the passes of the coming step take, on the device."""
        for part, batch in enumerate(batches):
            placed = tuple(tensor.to(self.device) for tensor in batch)
            yield self.feed.arguments(placed, self.step, part, self.stretch.phase)

    def _gradients(self, parts: Iterable[Batch]) -> None:
        """Adds up gradients and losses of this process's micro-batches in the masters."""
        self.masters.clear()
        with products_in_tf32(self.train.tf32 and self.device.type == "cuda"):
            for arguments in parts:
                self._passes[self._number](*arguments)

    def _add(self, train: Function, tokens: int, *arguments: Tensor) -> None:
        """Adds one micro-batch's gradients and loss to the masters. Captured as a CUDA graph: see there what it may
        do."""
        if tokens < self.window:
            arguments = tuple(argument.reshape(-1, tokens) for argument in arguments)
        loss = self.feed.loss(train, *arguments)
        torch.autograd.backward(loss)
        self.masters.collect()
        self.masters.loss.add_(loss.detach())

    def _replayed(self, work: Callable[..., None], alone: bool = False, pool: Any = None) -> Callable[..., None]:
        """`work` as a CUDA graph where this run has them; what sums over processes, only if it is `alone`."""
        graphs = self.compiled and self.device.type == "cuda" and not (alone and self.world.size > 1)
        return Captured(work, pool) if graphs else work

    def _updates(self) -> dict[tuple[str, ...], Callable[..., None]]:
        """The update, by the parameters that rest in it."""
        apply = self._apply
        return {names: self._replayed(partial(apply, one), alone=True) for names, one in self._resting.items()}

    def _enter(self, number: int) -> None:
        """Begins a stretch of the run, or goes on in it."""
        self._number = number
        self._resting[self._run[number].phase.rests].keep()

    def _round(self, moment: schedule.Moment, number: int) -> None:
        """Lets the model compute with rounded weights, once the spec says so; `number` is of the coming stretch."""
        if self._grids is not None and self._begins(moment, number):
            if self._inputs is not None and not self._inputs.measured:
                self._inputs.measure(self.masters.tensors)
            self._round_to(self._grids)

    def _begins(self, moment: schedule.Moment, number: int) -> bool:
        """Whether weights are rounded at a moment in a stretch."""
        if any(one.phase.rounds for one in self._run):  # weights and what reads them change as one
            return self._run[number].phase.rounds
        return self.train.qat is not None and moment.warm_down < self.train.qat.below

    def _round_to(self, grids: Mapping[str, Scheme] | None) -> None:
        if self.masters.round_to(grids, self._inputs.shares() if self._inputs is not None else None):
            self._moves = self._updates()  # the graphs still write what was shown before

    def _sum_up(self) -> Tensor:
        """The means over all micro-batches of all processes, clipped; returns the norm before clipping, f32 []."""
        self._finish()
        self.masters.attach()  # in Python, which a graph does not replay
        return self._norm

    def _clip(self) -> None:
        banks, clip_norm = self.optimizers.banks, self.train.clip_norm
        self._norm.copy_(mean_gradients(self.masters, banks, self.world, self.micro_batches, clip_norm))

    def _update(self, moment: schedule.Moment) -> None:
        self.optimizers.set(moment.multiplier, self.step, moment.done)
        self._moves[self.stretch.phase.rests]()
        if self.average is not None:
            self.average.update(self.step + 1, moment)

    def _apply(self, resting: Resting) -> None:
        self.optimizers.update()
        resting.undo()
        self.masters.refresh()

    def _launch(self, multiplier: float, numbers: Tensor) -> None:
        arrived = None
        if numbers.is_cuda:
            numbers = numbers.to("cpu", non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self._launched.append(_Launched(self.step + 1, multiplier, numbers, arrived, self.feed.counted()))

    def _known(self, lag: int) -> list[Step]:
        steps = []
        while len(self._launched) > lag:
            one = self._launched.popleft()
            if one.arrived is not None:
                one.arrived.synchronize()
            loss, norm = one.numbers.tolist()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                place = self.masters.first_not_finite()
                first = f"; the first parameter hit is {place}" if place is not None else ""
                message = f"step {one.step}: the loss is {loss} and the gradient norm {norm}{first}"
                raise RunFailure(message, _NOT_FINITE)
            seconds = self.clock.seconds
            since = max(seconds - self._last_seconds, 1e-9)
            samples, tokens = one.counted
            rate = (tokens - self._last_tokens) / since
            rows = None if samples is None else (samples - self._last_samples) / since
            self._last_seconds, self._last_tokens, self._last_samples = seconds, tokens, samples or 0
            steps.append(Step(one.step, loss, one.multiplier, norm, rate, seconds, rows))
        return steps
