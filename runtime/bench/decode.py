"""Greedy decoding of held-out lines by a model of pairs: with a cache and without, in each dtype, and in int8.

lines/s are lines over seconds, from text to text in this process, `eval.batch` lines at once. A first pass, which
captures CUDA graphs, precedes two timed passes. Weights that are stored as int8 run in the deployed programs, and only
with the cache. A spec that is scored by beam search is also timed with its beam.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specc.compiler.int8.products import integer_products
from specc.compiler.pipeline import lower
from specc.compiler.plan.lock import Lock
from specc.compiler.spec.spec import Spec
from specc.compiler.spec.train import ExactMatchSpec
from specc.runtime.artifact.quantized_model import QuantizedModel, dequantized
from specc.runtime.bench.compiling import Compiler
from specc.runtime.bench.rerun import Rerun, rerun_model
from specc.runtime.bench.timing import Measured
from specc.runtime.calibration.input_ranges import input_ranges
from specc.runtime.data.tokenizers.from_spec import characters_of
from specc.runtime.decode.lines import Translator, translator
from specc.runtime.decode.step_graphs import Steps
from specc.runtime.model.load import Loaded, initialize, instantiate
from specc.runtime.open_model import final_weights, read_verified, realize, realize_stored
from specc.runtime.quantize.quantizer import IntegerInputs, Quantizer
from specc.runtime.quantize.schemes import base_schemes, resolved
from specc.runtime.storage.quantized_run import ARTIFACT, quantized_artifact
from specc.runtime.storage.run_directory import Run
from specc.runtime.train.sources.source import OpenData, source_of

Say = Callable[[str], None]
INT8 = "int8"


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """The measurement of one decoder.

    Attributes:
        name: the dtype, the search and whether there is a cache.
        dtype: the compute dtype.
        cache: whether the decoder has a cache.
        beam: the beam size; 1 for greedy decoding.
        lines: the number of lines.
        batch: lines at once.
        passes: the time of a pass over all lines.
        building: seconds from the spec to the module on its device, including kernel compilation.
        first: the additional seconds of the first pass.
        exact: the number of lines that equal their target.
        agreeing: the share of lines equal to those of the decoder with a cache. None for that decoder.
    """

    name: str
    dtype: str
    cache: bool
    beam: int
    lines: int
    batch: int
    passes: Measured
    building: float
    first: float
    exact: int
    agreeing: float | None = None

    @property
    def lines_per_second(self) -> float:
        return 1e3 * self.lines / self.passes.ms


@dataclass(frozen=True, slots=True)
class Decoding:
    """All rows; whether they are of trained weights; and, by name, why rows are missing."""

    rows: tuple[DecodeRow, ...]
    trained: bool
    missing: Mapping[str, str]

    def gain(self, row: DecodeRow) -> float | None:
        """Returns a row's lines/s as a multiple of those without a cache, or None if these were not measured."""
        same = (one for one in self.rows if (one.dtype, one.beam, one.cache) == (row.dtype, row.beam, False))
        slow = next(same, None)
        return row.lines_per_second / slow.lines_per_second if slow is not None else None


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights to decode with: f32 parameters by name; for an artifact also the stored arrays and their spec."""

    floats: Mapping[str, Tensor]
    stored: QuantizedModel | None
    spec: Spec
    trained: bool


def measure(
    spec: Spec, target: str, lock: Lock, device: torch.device, weights: Path | None, folder: Path, say: Say
) -> Decoding:
    """Measures every row that the spec and the target allow.

    Args:
        spec: the spec of a model of pairs.
        target: the target to run.
        lock: the measured kernels.
        device: the device to decode on.
        weights: a run or an artifact. None for the initial weights of training.
        folder: the folder for generated code and data.
        say: reports progress.

    Returns:
        The rows.

    Raises:
        IntegrityError: if `weights` are of another model; otherwise as reading `weights`.
        QuantizeError: if the weights cannot be stored in int8.
    """
    match = spec.eval
    assert isinstance(match, ExactMatchSpec)
    rows: list[DecodeRow] = []
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        opened = source_of(spec).ready(spec, ()).open(spec.train.data.usual, folder, stack)
        given = _weights(spec, target, weights, folder / "start", say)
        for i, (dtype, make) in enumerate(_builds(spec, target, lock, device, given, opened, missing)):
            say(f"decode, {dtype}: builds")
            began = time.perf_counter()
            loaded = make()
            if device.type == "cuda":
                with Compiler(loaded.directory) as compiler:
                    compiler.all()
            building = time.perf_counter() - began
            try:
                rows += _timed(loaded, dtype, building, match, opened, device, folder / f"rerun{i}", missing, say)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # an error of a dtype other than the spec's own only omits its rows
                if i == 0:
                    raise
                missing[dtype] = f"{dtype}: {error}".splitlines()[0]
    return Decoding(tuple(rows), given.trained, missing)


def _weights(spec: Spec, target: str, path: Path | None, folder: Path, say: Say) -> _Weights:
    if path is None:
        loaded = instantiate(spec, target, folder)
        initialize(loaded, spec.train.seed)
        floats = {name: parameter.detach().clone() for name, parameter in loaded.model.named_parameters()}
        return _Weights(floats, None, spec, False)
    if not path.is_dir():
        found = read_verified(path)
        return _Weights(found.weights, found.stored, found.spec, True)
    run = Run.open(path)
    floats = final_weights(run, say)[0]
    if not run.quantized.joinpath(ARTIFACT).is_file():
        return _Weights(floats, None, spec, True)
    found = read_verified(quantized_artifact(run, say))
    say(f"int8: as {run.quantized} keeps it")
    return _Weights(floats, found.stored, found.spec, True)


Build = Callable[[], Loaded]


def _builds(
    spec: Spec,
    target: str,
    lock: Lock,
    device: torch.device,
    weights: _Weights,
    opened: OpenData,
    missing: dict[str, str],
) -> Iterator[tuple[str, Build]]:
    """Yields the model in each dtype that it can compute in on the target, starting with the spec's own, then
    in int8."""
    for dtype, one in spec_in_dtypes(spec, target).items():
        yield dtype, lambda one=one: realize(one, target, str(device), weights.floats, lock=lock)  # type: ignore[misc]
    programs = lower(spec, target)
    if integer_products(programs, base_schemes(spec.quant, programs.params)):
        stored, final = weights.stored, weights.spec
        if stored is None or not integer_products(programs, stored.schemes):
            stored, final = _quantized(spec, target, device, weights.floats, opened)
        kept = stored
        yield INT8, lambda: realize_stored(final, target, str(device), kept, dequantized(kept))
    else:
        missing[INT8] = "int8: the spec stores no product in it"


def spec_in_dtypes(spec: Spec, target: str) -> Mapping[str, Spec]:
    """Returns, by dtype, the spec for each dtype that its model can compute in on a target. The unchanged spec is
    first."""
    found = {lower(spec, target).params[0].dtype: spec}
    for dtype in (None, "f32") if "dtype" in type(spec.model).model_fields else ():
        model = spec.model.model_copy(update={"dtype": dtype})
        other = spec.model_copy(update={"model": model})
        found.setdefault(lower(other, target).params[0].dtype, other)
    return found


def _quantized(
    spec: Spec, target: str, device: torch.device, floats: Mapping[str, Tensor], opened: OpenData
) -> tuple[QuantizedModel, Spec]:
    """Returns the weights as `specc quantize` stores them, without its search of bits, and the resolved spec."""
    assert spec.quant is not None
    programs = lower(spec, target)
    schemes = base_schemes(spec.quant, programs.params)
    sources, wanted = integer_products(programs, schemes), spec.quant.calibrate
    placed = {name: tensor.to(device) for name, tensor in floats.items()}
    batches = (
        {name: ids.to(device) for name, ids in batch.items()}
        for batch in opened.calibration(wanted.sequences, wanted.batch)
    )
    ranges = input_ranges(programs, sources, batches, placed)
    stored = Quantizer(placed, inputs=IntegerInputs(sources, ranges)).model(schemes)
    return stored, resolved(spec, schemes)


def _timed(
    loaded: Loaded,
    dtype: str,
    building: float,
    match: ExactMatchSpec,
    opened: OpenData,
    device: torch.device,
    folder: Path,
    missing: dict[str, str],
    say: Say,
) -> Iterator[DecodeRow]:
    """Yields a row for each decoder of one module."""
    epoch, tokenizer, spec = opened.epoch, characters_of(loaded.spec), loaded.spec
    assert epoch is not None
    sources, targets = (tokenizer.decode_rows(side) for side in (epoch.held_out.source, epoch.held_out.target))
    gpu, window, texts = device.type == "cuda", spec.model.window, dict[int, list[str]]()
    for beam in (1, match.beam) if match.beam else (1,):
        for cache in (True, False) if dtype != INT8 else (True,):
            name = f"{dtype} {f'beam {beam}' if beam > 1 else 'greedy'}, {'cache' if cache else 'no cache'}"
            began = time.perf_counter()
            decoder = translator(loaded.model, spec, tokenizer, device, batch=match.batch, beam=beam, compiled=gpu)
            if not cache:
                try:
                    steps: Steps = Rerun(rerun_model(loaded, folder / str(beam)), window, gpu)
                except ValueError as error:
                    missing[name] = f"{name}: {error}"
                    continue
                decoder = Translator(steps, tokenizer, window, spec.model.reads_pads, device, match.batch, beam)
            making, seconds = time.perf_counter() - began, []
            for _ in range(3):
                began = time.perf_counter()
                found = decoder.translate(sources)
                seconds.append(time.perf_counter() - began)
            first, *later = seconds
            passes = Measured.of([1e3 * later[0]], [1e3 * later[1]])
            cached = texts.setdefault(beam, found)
            same = None if cache else sum(a == b for a, b in zip(found, cached, strict=True)) / len(found)
            exact = sum(a == b for a, b in zip(found, targets, strict=True))
            row = DecodeRow(
                name,
                dtype,
                cache,
                beam,
                len(found),
                match.batch,
                passes,
                building + making,
                max(0.0, first - passes.ms / 1e3),
                exact,
                same,
            )
            say(f"  {name}: {row.lines_per_second:,.0f} lines/s")
            yield row
