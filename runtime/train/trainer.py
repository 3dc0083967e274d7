"""The trainer performs single training steps, and holds the state of a run.

A step computes gradients over micro-batches and updates the weights. loop.py decides when the trainer steps, and when
the run validates and saves.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specc.compiler.programs.programs import DerivedWeight, Parameter, Phase
from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.train import TrainSpec
from specc.runtime.calibration.input_scales import InputScales
from specc.runtime.distributed.world import World
from specc.runtime.dtypes import DTYPES
from specc.runtime.errors import IntegrityError, RunFailure
from specc.runtime.log import Step
from specc.runtime.metrics.expert_load import expert_loads
from specc.runtime.metrics.loss_terms import loss_terms
from specc.runtime.metrics.share import Share, Sums
from specc.runtime.metrics.validation import Measured, Scorer, Validates
from specc.runtime.model.cuda_graph import Captured
from specc.runtime.optim.average import Average
from specc.runtime.optim.masters import Masters
from specc.runtime.optim.optimizers import Optimizers, Work, sharded_parameters, unclipped_parameters
from specc.runtime.optim.schedule import Moment, moment, value_at
from specc.runtime.storage.checkpoint import Snapshot, require_match
from specc.runtime.train.clock import Clock
from specc.runtime.train.dropout_draws import DropoutDraws
from specc.runtime.train.fp8_scales import Fp8Scales
from specc.runtime.train.loss_scale import LossScale
from specc.runtime.train.precision import products_in_tf32
from specc.runtime.train.segments import (
    Compile,
    Function,
    RunSegment,
    UnusedParameters,
    compiled_functions,
    run_segments,
    segment_at,
)
from specc.runtime.train.sources.feed import Batch, Feed

WARM_UP_STEPS = 3
WORK_STEPS = 10_000  # all programs that the next WORK_STEPS steps need are compiled before the clock starts
PART_TOKENS = 16384  # the approximate number of tokens on which the terms of the loss are measured
PART_WINDOWS = 4  # the number of validation windows in which the load of experts and the terms of the loss are measured
_NOT_FINITE = "the last checkpoint is unchanged; lower the learning rates, or set train.clip_norm"


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """A model to train.

    Attributes:
        module: the model, with f32 parameters. A call returns the mean loss in nats, f32 []. `module.score` returns the
            loss of each target in nats, f32 [B, T].
        parameters: the names and compute dtypes of the parameters.
        window: the number of tokens per row.
        spec_digest: the SHA-256 of the spec, for checkpoints.
        phases: the phases of the run, as in `Programs`. A phase selects the programs for training and scoring.
        schemes: the storage scheme of each parameter, by name, if the spec has `train.qat`; otherwise None.
        input_scales: the input scales of int8 products. None if the model has no int8 products.
        derived: the matrices that depend only on parameters, and are therefore computed once per step.
    """

    module: nn.Module
    parameters: Sequence[Parameter]
    window: int
    spec_digest: str
    phases: Sequence[Phase] = ()
    schemes: Mapping[str, Scheme] | None = None
    input_scales: InputScales | None = None
    derived: Sequence[DerivedWeight] = ()


@dataclass(frozen=True, slots=True)
class _Launched:
    """A training step that was started on the device. Its results may not have arrived on the host yet."""

    step: int
    multiplier: float
    numbers: Tensor  # f32 [2]: loss and gradient norm
    arrived: torch.cuda.Event | None
    counted: tuple[int | None, int]  # the numbers of samples and tokens so far, including this step
    scale: float | None = None  # the loss scale, if it changes
    skipped: bool = False


class Trainer:
    """Trains one model.

    The constructor moves the model to the device of `world`, and converts the parameters to their compute dtypes. With
    several processes, each process has a trainer, and all processes make the same calls. The processes sum their
    gradients and losses once per step. Each process updates only its part of the sharded parameters.

    Args:
        model: the model.
        train: the `train` section of the spec.
        feed: the batches of this process.
        world: the processes that train together, on their devices.
        compiled: whether to use torch.compile, and CUDA graphs on a GPU.
        compile_training: the function that compiles the training programs.

    Attributes:
        loads: the load of each expert in the last evaluation, from a part of the data. Empty if the model has no
            experts.
        terms: the terms of the loss in the last evaluation, from a part of the data. Empty if the loss has a single
            term.
        loss_scale: the loss scaling. None if the loss is not scaled.

    Raises:
        BatchError: if a step cannot be divided into micro-batches.
        LoweringError: if the optimizers do not match the parameters.
    """

    def __init__(
        self,
        model: TrainableModel,
        train: TrainSpec,
        feed: Feed,
        world: World,
        compiled: bool = False,
        compile_training: Compile = torch.compile,
    ) -> None:
        self.train, self.feed, self.loader, self.window = train, feed, feed.loader, model.window
        self.world, self.device, self.compiled = world, world.device, compiled
        self._module, self._spec_digest = model.module.to(self.device), model.spec_digest
        shapes = {parameter.name: parameter.shape for parameter in model.parameters}
        dtypes = {parameter.name: DTYPES[parameter.dtype] for parameter in model.parameters}
        self._schemes, self._input_scales = model.schemes, model.input_scales
        copied = [name for name, scheme in (self._schemes or {}).items() if scheme.has_grid]
        sharded = sharded_parameters(shapes, train.optimizers) if world.size > 1 else frozenset[str]()
        unclipped = unclipped_parameters(shapes, train.optimizers)
        in_bf16 = train.precision.masters == "bf16"
        self.masters = Masters(self._module, dtypes, sharded, copied, unclipped, in_bf16, model.derived)
        self.optimizers = Optimizers(self.masters.tensors, train.optimizers, world)
        self.average = Average(train.average, self.masters.weights) if train.average else None
        scaling = train.precision.scaling
        self.loss_scale = LossScale(scaling, self.device) if scaling is not None else None
        rows = train.at_once(world.size)
        self._draws = DropoutDraws(self._module, train.seed, rows, model.window, world)
        self._fp8 = Fp8Scales(self._module, rows * model.window, world, self._scale)
        self._norm = torch.zeros((), device=self.device)
        self._weights = torch.zeros(len(train.loss_weights), device=self.device)  # one per loss term
        self._segments = run_segments(model.phases, train, model.window, world.size)
        self._finish_gradients = self._finish_functions()
        state, unused = self.optimizers.state(), dict.fromkeys(segment.phase.rests for segment in self._segments)
        self._unused = {names: UnusedParameters(names, self.masters.tensors, state) for names in unused}
        self.masters.release()
        self._updates: dict[tuple[tuple[str, ...], Work], Callable[[], None]] = {}
        self.loads: Mapping[str, Sequence[float]] = {}
        self.terms: Mapping[str, float] = {}
        self._functions = compiled_functions(self._module, self._segments, compiled, compile_training)
        # CUDA graphs that run one at a time share memory. The graph of the f32 update of bf16 masters therefore reuses
        # the memory of activations.
        shared = self.device.type == "cuda" and compiled and (len(self._segments) > 1 or in_bf16)
        pool = torch.cuda.graph_pool_handle() if shared else None
        self._update_pool = pool if in_bf16 else None
        self._passes = [
            self._replayed(partial(self._pass, self._functions[segment.phase.train], segment.tokens), pool=pool)
            for segment in self._segments
        ]
        self._done_before = 0.0  # the completed fraction of the run before the last update
        self._enter(0)
        self.step = 0
        self.clock = Clock()
        self._launched: deque[_Launched] = deque()
        self._last_seconds = 0.0
        # The numbers of samples and tokens up to and including the last step that `advance` returned
        self._last: tuple[int | None, int] = (None, 0)

    @property
    def segment(self) -> RunSegment:
        """The segment of the run that contains the last update. Before the first update, the first segment."""
        return self._segments[self._index]

    @property
    def micro_batches(self) -> int:
        return self.segment.micro_batches

    @property
    def _scale(self) -> float:
        return self.loss_scale.value if self.loss_scale is not None else 1.0

    @property
    def segments_left(self) -> int:
        return len(self._segments) - 1 - self._index

    @property
    def fake_quantizes(self) -> bool:
        return self.masters.quantized is not None

    @property
    def calibrates_next(self) -> bool:
        """Whether the next update begins with a calibration of the input scales of int8 products."""
        if self._input_scales is None or self._input_scales.measured:
            return False
        next_update = moment(self.train, self.step, self.clock.common)
        return self._is_quantized_at(next_update, segment_at(self._segments, next_update.done))

    @property
    def done(self) -> float:
        """The completed fraction of the run, from 0 to 1. The run ends at 1."""
        return moment(self.train, self.step, self.clock.common).done

    def advance(self) -> list[Step]:
        """Performs one update. Returns the steps whose results have arrived from the device.

        On the CPU, the result is the current step. On a GPU, the result is the previous step, so that the device does
        not wait for the host.

        With a dynamic loss scale, the host waits for the gradients of each step. If a gradient is not finite, the step
        does not change the weights. The step still consumes a batch and counts as a step.

        Raises RunFailure if the loss or a gradient of a returned step is not finite. On the CPU, a step that raises
        this error does not change the weights.
        """
        now = moment(self.train, self.step, self.clock.common)
        index = segment_at(self._segments, now.done)
        self._fake_quantize_from(now, index)
        if index != self._index:
            self._enter(index)
        self._done_before = now.done
        self._gradients((self.loader.next() for _ in range(self.micro_batches)), now)
        numbers = torch.stack((self.masters.loss, self._norm))
        skipped = self._launch(now.multiplier, numbers)
        steps = self._arrived(lag=1 if self.device.type == "cuda" else 0)
        if not skipped:
            self.update(now)
        self._fp8.update(self._scale)
        self.step += 1
        return steps

    def update(self, now: Moment) -> None:
        self.optimizers.set(now)
        # In a profile, the kernels in this range count as optimizer kernels, even if a CUDA graph replays them
        with torch.profiler.record_function("specc.optimizer"):
            self._update_function(self.optimizers.work(now.step))()
        if self.average is not None:
            self.average.update(self.step + 1, now)

    def settle(self) -> list[Step]:
        """Waits for the device. Returns the steps that `advance` has not returned yet.

        Raises RunFailure if the loss or a gradient of a returned step is not finite.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._arrived(lag=0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context manager in which the training clock is stopped.

        Call `settle` first. Otherwise, the clock does not count the time of steps that still run on the device.
        """
        self.clock.stop()
        try:
            yield
        finally:
            self.clock.start()
            self._last_seconds = self.clock.seconds

    def warm_up(self, vocabulary: int, mark: Callable[[str], None] = lambda phase: None) -> None:
        """Compiles the steps of the current segment and of all later segments, by running them on random tokens.

        Afterwards, the method restores the state of the run.

        Args:
            vocabulary: the number of token ids.
            mark: a function that is called at the end of each part of the work, with the name of the part. The part
                `trace` is the first computation of gradients in a segment, which compiles the program. The part
                `warm_up` is all other work, including the capture of CUDA graphs.
        """
        before = self.snapshot().copied()
        generator = torch.Generator().manual_seed(0)
        shape = (self.train.at_once(self.world.size), self.window)
        for index in range(self._index, len(self._segments)):
            self._enter(index)
            steps = [step for step in self._steps_of_each_work() for _ in range(WARM_UP_STEPS)]
            for count, step in enumerate(steps):
                batch = self.feed.random_batch(shape, vocabulary, generator)
                self._gradients([batch], Moment(step=step), wait=True)
                if count == 0:
                    mark("trace")
                self.update(Moment(step=step))
            mark("warm_up")
        self.restore(before)
        mark("warm_up")

    def evaluate(
        self,
        validation: Validates,
        weights: Mapping[str, Tensor] | None = None,
        progress: Callable[[int, int], None] | None = None,
        meet: Callable[[], None] | None = None,
    ) -> Measured:
        """Scores the model. Each process scores a part of the data.

        Args:
            validation: the data and the metric.
            weights: the f32 weights to score, by parameter name. None for the current weights.
            progress: a function that is called between batches as `progress(scored, total)`.
            meet: a function that is called after this process has scored its part of the data. The processes sum their
                results afterwards.

        Returns:
            The result over all processes.

        Raises:
            RunFailure: if the loss is not finite.
        """

        def reduce(sums: Sums) -> Sums:
            if meet is not None:
                meet()
            return self.world.totals(sums)

        program, batch = self.segment.phase.score, list[tuple[Tensor, ...]]()

        def score(*inputs: Tensor) -> Tensor:
            if not batch:
                batch.append(inputs)
            losses: Tensor = self._functions[program](*inputs)
            return losses

        share = Share(self.world.rank, self.world.size, reduce)
        scorer = Scorer(self._module, score, self.window, self.device, share, progress, self.compiled)
        with self.masters.swapped(weights) if weights is not None else nullcontext():
            result = validation.measure(scorer)
            rows = [value[:PART_WINDOWS] for value in batch[0]] if batch else []
            if batch and any(parameter.dim() == 3 for parameter in self._module.parameters()):
                self.loads = expert_loads(self._module, getattr(self._module, program), *rows)
            if batch and len(self.train.losses) > 1:
                train = self._module if (name := self.segment.phase.train) == "train" else getattr(self._module, name)
                count = min(self.train.at_once(self.world.size), max(PART_TOKENS // self.window, 1))
                inputs = self.feed.of_scored(*(value[:count] for value in rows))
                self.terms = loss_terms(self._module, train, self.train.losses, inputs)
        if not math.isfinite(result.nats):
            raise RunFailure(f"step {self.step}: the validation loss is {result.nats}", _NOT_FINITE)
        return result

    def totals(self) -> dict[str, float]:
        """Returns the numbers of samples and tokens so far, as fields of the log.

        The fields state totals, and rates per second of training. The result is empty if the data have no samples.
        """
        samples, tokens = self.feed.counted()
        if samples is None:
            return {}
        rate = 1 / max(self.clock.seconds, 1e-9)
        return {
            "samples": samples,
            "tokens": tokens,
            "samples_per_second": samples * rate,
            "tokens_per_second": tokens * rate,
        }

    def require_same(self) -> None:
        if self.world.size > 1:
            self.world.require_same("weight", self.masters.digests())

    def gather(self) -> None:
        """Gathers the complete optimizer state on every process, so that a single process can save the state.

        All processes must call this method.
        """
        self.optimizers.gather()

    def snapshot(self) -> Snapshot:
        """Returns the complete state of the run between two steps. Tensors are not copied.

        With several processes, call `gather` first. Otherwise, the optimizer state of sharded parameters is outdated.
        """
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        return Snapshot(
            self.step,
            self.clock.seconds,
            self.masters.weights(),
            self.average.tensors if self.average is not None else None,
            {
                **self.optimizers.state(),
                **(self.average.state() if self.average is not None else {}),
                **(self._input_scales.state() if self._input_scales is not None else {}),
                **(self.loss_scale.state() if self.loss_scale is not None else {}),
                **self._fp8.state(),
            },
            rng,
            self.loader.state(),
            self._spec_digest,
            self._done_before,
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Restores the state in `snapshot`. Raises IntegrityError if the snapshot belongs to another model.

        After an error, the state of the trainer is unchanged.
        """
        current = self.snapshot()
        if snapshot.spec_digest != self._spec_digest:
            raise IntegrityError("the checkpoint belongs to another spec", "resume with the spec of the run")
        require_match("the checkpoint's model", snapshot.weights, current.weights)
        if snapshot.weights_alone:
            self._start(snapshot.weights)
            return
        snapshot = replace(snapshot, optimizer=self.optimizers.completed(snapshot.optimizer, snapshot.step))
        require_match("the checkpoint's optimizer", snapshot.optimizer, current.optimizer)
        require_match("the checkpoint's average", snapshot.average or {}, current.average or {})
        require_match("the checkpoint's generators", snapshot.rng, current.rng)
        self.loader.restore(snapshot.loader)
        self._fake_quantize(None)
        self.masters.restore(snapshot.weights)
        self.optimizers.restore(snapshot.optimizer)
        if self._input_scales is not None:
            self._input_scales.restore(snapshot.optimizer)
        if self.loss_scale is not None:
            self.loss_scale.restore(snapshot.optimizer)
        self._fp8.restore(snapshot.optimizer, self._scale)
        if self.average is not None and snapshot.average is not None:
            self.average.restore(snapshot.average, snapshot.optimizer)
        torch.set_rng_state(snapshot.rng["cpu"])
        if "cuda" in snapshot.rng:
            torch.cuda.set_rng_state(snapshot.rng["cuda"], self.device)
        self._done_before = snapshot.done
        self._enter(segment_at(self._segments, snapshot.done))
        self.step = snapshot.step
        self.clock.set(snapshot.seconds)
        if self.step:
            self._fake_quantize_from(moment(self.train, self.step - 1, self.clock.common), self._index)
        self._last_seconds, self._last = snapshot.seconds, self.feed.counted()
        self._launched.clear()

    def _start(self, weights: Mapping[str, Tensor]) -> None:
        self.masters.restore(weights)
        self._fp8.begin(self._scale)
        if self.average is not None:
            self.average.restore(weights, self.average.state())
        self._enter(self._index)

    def _gradients(self, batches: Iterable[Batch], now: Moment, wait: bool = False) -> None:
        """Computes the mean loss and the mean gradients over all micro-batches of all processes, and clips the
        gradients.

        The method sets `_norm` to the norm of the gradients before clipping. If `wait` is True, the processes wait for
        each other on the host before they sum the gradients. Without this wait, the sum could time out while another
        process still compiles.
        """
        self.masters.clear()
        self._set_weights(now)
        with products_in_tf32(self.train.precision.tf32 and self.device.type == "cuda"):
            for part, batch in enumerate(batches):
                batch = tuple(tensor.to(self.device) for tensor in batch)
                self._draws.write(now.step, part)
                self._passes[self._index](*self.feed.arguments(batch, now, part, self.segment.phase))
        if wait:
            self.world.wait()
        self._finish_gradients[self.micro_batches]()
        self.masters.attach()  # sets Python attributes, which the replay of a CUDA graph does not set

    def _set_weights(self, now: Moment) -> None:
        terms = [term for term in self.train.losses if term.input]
        if weights := [value_at(term.weight, now) * (self._scale if term.states else 1.0) for term in terms]:
            tensor = torch.tensor(weights)
            self._weights.copy_(tensor.pin_memory() if self._weights.is_cuda else tensor, non_blocking=True)

    def _pass(self, train: Function, tokens: int, *arguments: Tensor) -> None:
        if tokens < self.window:
            arguments = tuple(argument.reshape(-1, tokens) for argument in arguments)
        loss = self.feed.loss(lambda *inputs: train(*inputs, *self._weights.unbind()), *arguments)
        torch.autograd.backward(loss, self.loss_scale.factor if self.loss_scale is not None else None)
        self.masters.collect()
        self.masters.loss.add_(loss.detach())

    def _replayed(self, work: Callable[..., None], collective: bool = False, pool: Any = None) -> Callable[..., None]:
        captured = self.compiled and self.device.type == "cuda" and not (collective and self.world.size > 1)
        return Captured(work, pool) if captured else work

    def _steps_of_each_work(self) -> list[int]:
        left = WORK_STEPS if self.train.steps is None else max(min(self.train.steps - self.step, WORK_STEPS), 1)
        first: dict[Work, int] = {}
        for step in range(self.step, self.step + left):
            first.setdefault(self.optimizers.work(step), step)
        return list(first.values())

    def _update_function(self, work: Work) -> Callable[[], None]:
        rests = self.segment.phase.rests
        if (rests, work) not in self._updates:
            update = partial(self._apply, self._unused[rests], work)
            waits = self.optimizers.waits(work)
            pool = self._update_pool
            self._updates[rests, work] = update if waits else self._replayed(update, collective=True, pool=pool)
        return self._updates[rests, work]

    def _enter(self, index: int) -> None:
        self._index = index
        with self.masters.in_f32(changes=False):
            self._unused[self._segments[index].phase.rests].save()

    def _fake_quantize_from(self, now: Moment, index: int) -> None:
        if self._schemes is not None and self._is_quantized_at(now, index):
            if self._input_scales is not None and not self._input_scales.measured:
                self._input_scales.measure(self.masters.tensors)
            self._fake_quantize(self._schemes)

    def _is_quantized_at(self, now: Moment, index: int) -> bool:
        if any(
            segment.phase.rounds for segment in self._segments
        ):  # weights and the inputs of the programs become quantized in the same step
            return self._segments[index].phase.rounds
        return self.train.qat is not None and now.warm_down < self.train.qat.below

    def _fake_quantize(self, schemes: Mapping[str, Scheme] | None) -> None:
        shares = self._input_scales.shares() if self._input_scales is not None else None
        if self.masters.fake_quantize(schemes, shares):
            self._updates.clear()  # the captured graphs write to the previous copies
            if self.masters.derived.leaves:  # the captured graphs read the previous values of parameters
                self._finish_gradients = self._finish_functions()

    def _finish_functions(self) -> dict[int, Callable[[], None]]:
        return {
            count: self._replayed(partial(self._mean_gradients, count), collective=True)
            for count in {segment.micro_batches for segment in self._segments}
        }

    def _mean_gradients(self, micro_batches: int) -> None:
        banks, clip_norm = self.optimizers.banks, self.train.clip_norm
        scale = self.loss_scale.factor if self.loss_scale is not None else None
        self._norm.copy_(self.masters.finish(micro_batches, clip_norm, banks, self.world, scale))

    def _apply(self, unused: UnusedParameters, work: Work) -> None:
        with self.masters.in_f32():
            self.optimizers.update(work)
            unused.restore()
        self.masters.refresh()

    def _launch(self, multiplier: float, numbers: Tensor) -> bool:
        """Starts to copy `numbers`, the loss and the gradient norm, to the host.

        Returns whether the trainer must skip the update. With a dynamic loss scale, the method waits until `numbers`
        have arrived on the host.
        """
        arrived, scale, skipped = None, None, False
        if numbers.is_cuda:
            numbers = numbers.to("cpu", non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        if self.loss_scale is not None and self.loss_scale.changes:
            if arrived is not None:
                arrived.synchronize()
            scale = self.loss_scale.value
            skipped = self.loss_scale.skips(bool(numbers.isfinite().all()))
        counted = self.feed.counted()
        self._launched.append(_Launched(self.step + 1, multiplier, numbers, arrived, counted, scale, skipped))
        return skipped

    def _arrived(self, lag: int) -> list[Step]:
        steps = []
        while len(self._launched) > lag:
            launched = self._launched.popleft()
            if launched.arrived is not None:
                launched.arrived.synchronize()
            loss, norm = launched.numbers.tolist()
            if not (math.isfinite(loss) and math.isfinite(norm)) and not launched.skipped:
                place = self.masters.first_not_finite()
                first = f"; the first parameter with NaN or infinity is {place}" if place is not None else ""
                message = f"step {launched.step}: the loss is {loss} and the gradient norm {norm}{first}"
                raise RunFailure(message, _NOT_FINITE)
            seconds, (samples, tokens), (last_samples, last_tokens) = self.clock.seconds, launched.counted, self._last
            elapsed = max(seconds - self._last_seconds, 1e-9)
            rows = None if samples is None else (samples - (last_samples or 0)) / elapsed
            count, scale, skipped = tokens - last_tokens, launched.scale, launched.skipped or None
            step, rate = launched.step, count / elapsed
            numbers = (loss, launched.multiplier, norm, rate, seconds, rows, count, scale, skipped)
            steps.append(Step(step, *numbers))
            self._last_seconds, self._last = seconds, launched.counted
        return steps
