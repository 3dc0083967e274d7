"""Measures decoding by a model that maps lines to lines: with and without a cache, in each dtype, and in int8.

The decoded lines are held out from training. The rate in lines/s includes all work from source text to target text. A
batch has `eval.batch` lines of the spec. Each decoder runs one untimed pass, which captures CUDA graphs, and then two
timed passes. For int8, the int8 programs of an artifact decode with a cache; int8 without a cache is not measured.
Decoding is greedy. If the spec scores with beam search, beam search is measured too.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from specc.compiler.int8.products import integer_products
from specc.compiler.pipeline import lower
from specc.compiler.spec.spec import Spec
from specc.compiler.spec.train import ExactMatchSpec
from specc.runtime.artifact.quantized_model import QuantizedModel, dequantized
from specc.runtime.bench.compiling import Compiler
from specc.runtime.bench.environment import Setup
from specc.runtime.bench.rerun import uncached_translator
from specc.runtime.bench.timing import Measured
from specc.runtime.data.tokenizers.from_spec import characters_of
from specc.runtime.decode.lines import translator
from specc.runtime.model.load import Loaded, initialize, instantiate
from specc.runtime.open_model import final_weights, read_verified, realize, realize_stored
from specc.runtime.quantize.assignment import base_schemes
from specc.runtime.storage.quantized_run import ARTIFACT, quantized_artifact
from specc.runtime.storage.run_directory import Run
from specc.runtime.train.sources.source import OpenData, source_of
from specc.runtime.verify.deployed import quantized

INT8 = "int8"


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """The measurement of one decoder.

    Attributes:
        name: the name of the decoder, which states the dtype, the kind of search, and whether there is a cache.
        dtype: the compute dtype.
        cache: whether the decoder has a cache.
        beam: the beam size; 1 for greedy decoding.
        lines: the number of lines.
        batch: the number of lines per batch.
        ms: the time of a pass over all lines.
        spread: the difference between the times of the two timed passes, divided by the smaller time.
        building: the seconds to generate the module from the spec, to compile its kernels, and to move it to its
            device.
        first: the additional seconds of the first pass, which compiles code and captures CUDA graphs. The first pass is
            not included in `ms`.
        exact: the number of decoded lines that equal their target line.
        agreeing: the fraction of lines for which this decoder returns the same text as the decoder with a cache. None
            for the decoder with a cache.
    """

    name: str
    dtype: str
    cache: bool
    beam: int
    lines: int
    batch: int
    ms: float
    spread: float
    building: float
    first: float
    exact: int
    agreeing: float | None

    @property
    def lines_per_second(self) -> float:
        return 1e3 * self.lines / self.ms

    @property
    def exact_match(self) -> float:
        return self.exact / self.lines


@dataclass(frozen=True, slots=True)
class Decoding:
    """The measurements of all decoders.

    `trained` states whether the weights come from training. `missing` maps the name of each decoder that was not
    measured to the reason.
    """

    rows: tuple[DecodeRow, ...]
    trained: bool
    missing: Mapping[str, str]

    def over_uncached(self, row: DecodeRow) -> float | None:
        """Returns the lines/s of a row, divided by the lines/s of the decoder without a cache that has the same dtype
        and beam size. None if that decoder was not measured.
        """
        for other in self.rows:
            if (other.dtype, other.beam, other.cache) == (row.dtype, row.beam, False):
                return row.lines_per_second / other.lines_per_second
        return None


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights of the decoders. `floats` has the f32 parameters by name. `stored` has the arrays of the artifact;
    None without an artifact.
    """

    floats: Mapping[str, Tensor]
    stored: QuantizedModel | None
    spec: Spec
    trained: bool


def measure(setup: Setup, weights: Path | None) -> Decoding:
    """Measures every decoder that the spec and the target allow.

    Args:
        setup: the setup of the benchmark. Its spec must have the architecture `encoder_decoder`.
        weights: a run directory or an artifact whose weights the decoders use. None selects initial weights.

    Returns:
        One row per measured decoder, and the reason for each decoder that was not measured.

    Raises:
        IntegrityError: if `weights` belong to another model.
        QuantizeError: if the weights cannot be stored in int8.
        RuntimeFailure: if `weights` cannot be read.
    """
    spec, device = setup.spec, setup.device
    rows: list[DecodeRow] = []
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        opened = source_of(spec)(spec, ()).open(spec.train.data.usual, setup.folder, stack)
        source = _weights(setup, weights)
        for i, (dtype, build) in enumerate(_builds(setup, source, opened, missing)):
            setup.say(f"decode, {dtype}: builds")
            began = time.perf_counter()
            loaded = build()
            if device.type == "cuda":
                with Compiler(loaded.directory) as compiler:
                    compiler.all()
            building = time.perf_counter() - began
            try:
                for row in _timed(replace(setup, folder=setup.folder / f"rerun{i}"), loaded, dtype, opened, missing):
                    rows.append(replace(row, building=row.building + building))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # an error in another dtype is reported as a missing decoder
                if i == 0:
                    raise
                missing[dtype] = f"{dtype}: {error}".splitlines()[0]
    return Decoding(tuple(rows), source.trained, missing)


def _weights(setup: Setup, path: Path | None) -> _Weights:
    spec = setup.spec
    if path is None:
        loaded = instantiate(spec, setup.target, setup.folder / "start")
        initialize(loaded, spec.train.seed)
        floats = {name: parameter.detach().clone() for name, parameter in loaded.model.named_parameters()}
        return _Weights(floats, None, spec, False)
    if not path.is_dir():
        verified = read_verified(path)
        return _Weights(verified.weights, verified.stored, verified.spec, True)
    run = Run.open(path)
    floats, _ = final_weights(run, setup.say)
    if not run.quantized.joinpath(ARTIFACT).is_file():
        return _Weights(floats, None, spec, True)
    verified = read_verified(quantized_artifact(run, setup.say))
    setup.say(f"int8: the weights of {run.quantized}")
    return _Weights(floats, verified.stored, verified.spec, True)


def _builds(
    setup: Setup, weights: _Weights, opened: OpenData, missing: dict[str, str]
) -> Iterator[tuple[str, Callable[[], Loaded]]]:
    spec, target, device = setup.spec, setup.target, str(setup.device)
    for dtype, other in spec_in_dtypes(spec, target).items():
        yield dtype, partial(realize, other, target, device, weights.floats, lock=setup.lock)
    programs = lower(spec, target)
    if not integer_products(programs, base_schemes(spec.quant, programs.params)):
        missing[INT8] = "int8: the spec has no int8 products"
        return
    stored, final = weights.stored, weights.spec
    if stored is None or not integer_products(programs, stored.schemes):
        assert spec.quant is not None
        text = spec.quant.calibrate
        batches = (
            {name: ids.to(setup.device) for name, ids in batch.items()}
            for batch in opened.calibration(text.sequences, text.batch)
        )
        floats = {name: tensor.to(setup.device) for name, tensor in weights.floats.items()}
        stored, final = quantized(spec, target, floats, batches)
    yield INT8, partial(realize_stored, final, target, device, stored, dequantized(stored))


def spec_in_dtypes(spec: Spec, target: str) -> Mapping[str, Spec]:
    """Returns copies of the spec that compute in other dtypes, by dtype. There is one copy for each dtype that the
    target supports. The first entry is the unchanged spec with its own dtype.
    """
    specs = {lower(spec, target).params[0].dtype: spec}
    for dtype in (None, "f32") if "dtype" in type(spec.model).model_fields else ():
        model = spec.model.model_copy(update={"dtype": dtype})
        other = spec.model_copy(update={"model": model})
        specs.setdefault(lower(other, target).params[0].dtype, other)
    return specs


def _timed(setup: Setup, loaded: Loaded, dtype: str, opened: OpenData, missing: dict[str, str]) -> Iterator[DecodeRow]:
    spec, match, epoch, device = loaded.spec, setup.spec.eval, opened.epoch, setup.device
    assert epoch is not None and isinstance(match, ExactMatchSpec)
    tokenizer = characters_of(spec)
    sources, targets = (tokenizer.decode_rows(side) for side in (epoch.held_out.source, epoch.held_out.target))
    cached: dict[int, list[str]] = {}
    for beam, cache in product((1, match.beam) if match.beam else (1,), (True, False) if dtype != INT8 else (True,)):
        name = f"{dtype} {f'beam {beam}' if beam > 1 else 'greedy'}, {'cache' if cache else 'no cache'}"
        began = time.perf_counter()
        try:
            if cache:
                gpu = device.type == "cuda"
                decoder = translator(loaded.model, spec, tokenizer, device, batch=match.batch, beam=beam, compiled=gpu)
            else:
                decoder = uncached_translator(loaded, setup.folder / str(beam), device, match.batch, beam)
        except ValueError as error:
            missing[name] = f"{name}: {error}"
            continue
        building, seconds = time.perf_counter() - began, []
        for _ in range(3):
            began = time.perf_counter()
            texts = decoder.translate(sources)
            seconds.append(time.perf_counter() - began)
        time_of_pass = Measured.of([1e3 * seconds[1]], [1e3 * seconds[2]])
        row = DecodeRow(
            name=name,
            dtype=dtype,
            cache=cache,
            beam=beam,
            lines=len(texts),
            batch=match.batch,
            ms=time_of_pass.ms,
            spread=time_of_pass.spread,
            building=building,
            first=max(0.0, seconds[0] - time_of_pass.ms / 1e3),
            exact=_equal(texts, targets),
            agreeing=None if cache else _equal(texts, cached[beam]) / len(texts),
        )
        cached.setdefault(beam, texts)
        setup.say(f"  {name}: {row.lines_per_second:,.0f} lines/s")
        yield row


def _equal(texts: list[str], others: list[str]) -> int:
    return sum(a == b for a, b in zip(texts, others, strict=True))
