"""Measures greedy decoding of texts of equal length: by specc with a contiguous cache, by specc with a paged cache, and
by the library Transformers.

On a GPU, a decoding step of up to 64 texts uses kernels for products with few rows. As a baseline, the benchmark also
measures a step that calls the library for these products. Both steps are also measured under torch.compile. If the
weights come from an artifact, the benchmark also measures a step that directly reads the quantized codes.

A completed text has `context` tokens. Its first tokens are random, and are prefilled. Its last tokens are decoded one
at a time. Only this decoding is timed. Each decoder runs one untimed pass, which compiles code and captures CUDA
graphs, and then two timed passes. Before the timed passes, the logits of the decoder are compared with the logits of
the decoder with a contiguous cache, for the same tokens.

Transformers loads the same weights in the same dtype, from a folder that `specc export --format hf` could write. Its
method `generate` is measured with a dynamic cache, and with a static cache and compiled code.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.compiler.kernels.gemm.rows import MOST_ROWS
from specc.compiler.pipeline import lower, reads_codes, run
from specc.compiler.programs.cost import decode_cost
from specc.compiler.programs.programs import Programs
from specc.compiler.spec.spec import Spec
from specc.runtime.bench.ceilings import Ceilings, Work
from specc.runtime.bench.compiling import Compiler
from specc.runtime.bench.environment import Setup
from specc.runtime.bench.step import release
from specc.runtime.bench.timing import Measured, wait
from specc.runtime.decode.few_rows import library_step, step_of
from specc.runtime.decode.pages import decoder_of, in_pages, with_cache
from specc.runtime.decode.sampling import Sampling
from specc.runtime.decode.text import BLOCK, Decoder, StepFunction
from specc.runtime.errors import RunFailure, RuntimeFailure
from specc.runtime.hugging_face.exporting import write_model
from specc.runtime.model.load import Loaded, initialize, instantiate
from specc.runtime.open_model import Verified, final_weights, read_verified, realize
from specc.runtime.storage.run_directory import Run

CONTIGUOUS, PAGED = "contiguous cache", "cache in pages"
COMPILED, LIBRARY = "torch.compile", "library products"
LIBRARY_COMPILED = "library, torch.compile"
CODES = "codes of the artifact"
OWN = (CONTIGUOUS, PAGED, COMPILED, LIBRARY, LIBRARY_COMPILED, CODES)
DYNAMIC, STATIC = "transformers, dynamic", "transformers, static, compiled"
BATCHES = {"cuda": (1, 8, 64, 256), "cpu": (1, 8)}
CONTEXTS = {"cuda": (128, 512, 2048, 8192), "cpu": (128, 512)}
LEAST = 4  # the minimum number of tokens of a text: two are prefilled, and two are timed
TIMED = 64  # the default number of timed tokens per text; at most half of a text is timed
TOLERANCE = {
    "f32": 1e-3,
    "bf16": 0.1,
    "f16": 0.02,
}  # the maximum difference of logits, relative to the largest logit
GREEDY = Sampling(temperature=0)

# A function that prefills prompts and decodes a number of tokens. It returns the ms per token.
Pass = Callable[[Tensor, int], float]


@dataclass(frozen=True, slots=True)
class TextRow:
    """The measurement of one decoder with one batch size and one text length.

    Attributes:
        decoder: the name of the decoder.
        batch: the number of texts.
        context: the number of tokens of a completed text.
        tokens: the number of timed tokens of each text.
        token: the time of a step, which decodes one token for each text.
        first: the seconds by which the untimed first pass exceeded a timed pass.
        floor_ms: the minimum time of a step in ms, at the peak rates of the device.
        error: the largest difference from the logits of the decoder with a contiguous cache, divided by the largest
            logit. None for that decoder.
    """

    decoder: str
    batch: int
    context: int
    tokens: int
    token: Measured
    first: float
    floor_ms: float
    error: float | None

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.batch / self.token.ms

    @property
    def share_of_floor(self) -> float:
        return self.floor_ms / self.token.ms


@dataclass(frozen=True, slots=True)
class TextDecoding:
    """The measurements of all decoders.

    `dtype` is the dtype of the weights. `trained` states whether the weights come from training. `missing` maps the
    name of each decoder that was not measured to the reason.
    """

    rows: tuple[TextRow, ...]
    dtype: str
    trained: bool
    missing: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Cell:
    """The settings of all measurements with one batch size and one text length."""

    batch: int
    context: int
    tokens: int
    tolerance: float
    ceilings: Ceilings

    def floor_ms(self, programs: Programs) -> float:
        cost = decode_cost(programs, self.batch, self.context - self.tokens // 2)
        return self.ceilings.floor_ms(Work(cost.flops, cost.weights + cost.cache, 0))


@dataclass(frozen=True, slots=True)
class _Decoder:
    """A decoder to measure. For each batch size and text length, `logits` and `passes` create new caches and CUDA
    graphs.

    Attributes:
        logits: a function that maps tokens, i64 [rows, T], to the logits after the last token. The decoder prefills all
            tokens except the last, and decodes the last token.
        passes: a function that maps the number of texts and the number of tokens of a completed text to the function
            that is timed.
        programs: the programs whose parameters and cache a step reads.
        most: the maximum number of texts for which a step runs these programs; None for no limit.
    """

    logits: Callable[[Tensor], Tensor]
    passes: Callable[[int, int], Pass]
    programs: Programs
    most: int | None = None


def measure(
    setup: Setup,
    ceilings: Ceilings,
    weights: Path | None,
    batches: Sequence[int],
    contexts: Sequence[int],
    timed: int | None = None,
) -> TextDecoding:
    """Measures each decoder that this machine can run, with each batch size and each text length.

    Args:
        setup: the setup of the benchmark. Its spec must describe a text model.
        ceilings: the peak rates of the device, from which minimum times are computed.
        weights: a run directory or an artifact whose weights the decoders use. None selects initial weights.
        batches: the numbers of texts per batch. If empty, the entries of BATCHES are used.
        contexts: the numbers of tokens of a completed text. If empty, the entries of CONTEXTS are used, limited to the
            context of the model.
        timed: the number of timed tokens of each text. None selects TIMED tokens, or half of the text if half is less.

    Returns:
        One row per measurement, and the reason for each decoder that was not measured.

    Raises:
        RunFailure: if a text length exceeds the context of the model, a text is too short for the timed tokens, or two
            decoders of specc return different logits.
        RuntimeFailure: if `weights` cannot be read.
    """
    spec, device = setup.spec, setup.device
    window = spec.model.window
    contexts = contexts or sorted({min(size, window) for size in CONTEXTS[device.type]})
    if wrong := [size for size in contexts if not LEAST <= size <= window]:
        message = f"a context of {wrong[0]} tokens is not in the range of {spec.name}, {LEAST} to {window}"
        raise RunFailure(message, "choose other lengths with --context")
    if timed is not None and timed > min(contexts) - 2:
        message = f"a context of {min(contexts)} tokens is too short for {timed} timed tokens after two prompt tokens"
        raise RunFailure(message, f"set --tokens to at most {min(contexts) - 2}")
    floats, stored, trained = _weights(setup, weights)
    programs = lower(_contiguous(spec), setup.target)
    dtype, missing = programs.params[0].dtype, dict[str, str]()
    decoders = dict(_decoders(setup, floats, stored, programs, missing))
    rows: list[TextRow] = []
    for context in contexts:
        for batch in batches or BATCHES[device.type]:
            tokens = timed or min(TIMED, context // 2)
            cell = _Cell(batch, context, tokens, TOLERANCE[dtype], ceilings)
            for row in _rows(setup, decoders, cell, missing):
                setup.say(f"  {row.decoder}, {batch} x {context}: {row.tokens_per_second:,.0f} tokens/s")
                rows.append(row)
    return TextDecoding(tuple(rows), dtype, trained, missing)


def _weights(setup: Setup, path: Path | None) -> tuple[Mapping[str, Tensor], Verified | None, bool]:
    if path is None:
        loaded = instantiate(setup.spec.at_rest, setup.target, setup.folder / "start")
        initialize(loaded, setup.spec.train.seed)
        torch.manual_seed(setup.spec.train.seed)
        floats = {name: parameter.detach() for name, parameter in loaded.model.named_parameters()}
        for tensor in floats.values():
            # Some blocks output zero at initialization, which would hide wrong values
            if tensor.ndim > 1 and not tensor.any():
                tensor.normal_(std=0.02)
        return floats, None, False
    if path.is_dir():
        return final_weights(Run.open(path), setup.say)[0], None, True
    verified = read_verified(path)
    return verified.weights, verified, True


def _contiguous(spec: Spec) -> Spec:
    return with_cache(spec, page=None)


def _decoders(
    setup: Setup, weights: Mapping[str, Tensor], artifact: Verified | None, programs: Programs, missing: dict[str, str]
) -> Iterator[tuple[str, _Decoder]]:
    """Yields a pair (name, decoder) for each decoder that this machine can run. The first decoder has a contiguous
    cache.

    Args:
        setup: the setup of the benchmark.
        weights: the parameters, f32, by name.
        artifact: the artifact that contains the parameters; None if there is none.
        programs: the programs of the model with a contiguous cache.
        missing: the function adds the reason for each decoder that cannot run, with the name of the decoder as the key.
    """
    for name, prepared in ((CONTIGUOUS, _contiguous), (PAGED, in_pages)):
        setup.say(f"decode, {name}: builds")
        try:
            spec = prepared(setup.spec)
        except RunFailure as error:
            missing[name] = f"{name}: {error.message}"
            continue
        loaded = realize(spec, setup.target, str(setup.device), weights, lock=setup.lock)
        if setup.device.type == "cuda":
            with Compiler(loaded.directory) as compiler:
                compiler.all()
        decoder = partial(_ours, loaded, setup.device, programs)
        yield name, decoder(partial(step_of, loaded))
        if name == CONTIGUOUS and setup.device.type == "cuda":
            yield COMPILED, decoder(partial(step_of, loaded, compiled=True))
            yield LIBRARY, decoder(partial(library_step, loaded))
            yield LIBRARY_COMPILED, decoder(partial(library_step, loaded, compiled=True))
            quantized = loaded.spec.model_copy(update={"quant": artifact.spec.quant}) if artifact is not None else spec
            if artifact is not None and reads_codes(quantized, setup.target):
                coded = replace(loaded, spec=quantized, stored=artifact.stored.tensors)
                packed = run(quantized, setup.target, form="packed")
                codes = _ours(coded, setup.device, packed, partial(step_of, coded))
                yield CODES, replace(codes, most=MOST_ROWS)
            elif artifact is not None:
                missing[CODES] = f"{CODES}: no step reads them; `specc plan` states the storage of each product"
    try:
        model = _transformers(setup, weights, programs.params[0].dtype)
    except RuntimeFailure as error:
        missing[DYNAMIC] = f"transformers: {error.message}"
        return
    for name, cache in ((DYNAMIC, "dynamic"), (STATIC, "static")):
        yield name, _theirs(model, cache, setup.device, programs)


def _ours(
    loaded: Loaded, device: torch.device, programs: Programs, step_of_rows: Callable[[int], StepFunction]
) -> _Decoder:
    """Returns a decoder to measure that runs a model of specc.

    Args:
        loaded: the model.
        device: the device of the model.
        programs: the programs whose parameters and cache a step reads.
        step_of_rows: a function that maps a number of texts to the function that decodes one token of each text.
    """
    model: Any = loaded.model

    def decoder(rows: int, context: int) -> Decoder:
        return decoder_of(model, context, device, rows, step_of_rows(rows))

    def logits(ids: Tensor) -> Tensor:
        each = decoder(*ids.shape)
        each.prefill(ids[:, :-1])
        return each.append(ids[:, -1]).clone()

    def passes(rows: int, context: int) -> Pass:
        return partial(_sample, decoder(rows, context), loaded.spec.model.vocabulary)

    return _Decoder(logits, passes, programs)


def _sample(decoder: Decoder, vocabulary: int, prompts: Tensor, count: int) -> float:
    unread = torch.zeros(
        count + 1, len(prompts), dtype=torch.float64, device=prompts.device
    )  # greedy decoding uses no random numbers
    decoder.prefill(prompts)
    decoder.write(GREEDY, vocabulary, unread[:1])
    wait(prompts.device)
    began = time.perf_counter()
    *_, last = (decoder.write(GREEDY, vocabulary, numbers) for numbers in torch.split(unread[1:], BLOCK))
    wait(prompts.device)
    ms = 1e3 * (time.perf_counter() - began) / count
    if int(last.min()) < 0:
        raise RunFailure("decode: the logits are not finite", "decode with other --weights")
    return ms


def _transformers(setup: Setup, weights: Mapping[str, Tensor], dtype: str) -> Any:
    if find_spec("transformers") is None:
        raise RunFailure("is not installed: pip install transformers")
    folder = setup.folder / "transformers"
    folder.mkdir(parents=True, exist_ok=True)
    cpu = {name: tensor.detach().float().cpu() for name, tensor in weights.items()}
    write_model(folder, _contiguous(setup.spec).model, cpu, dtype)
    import transformers

    untyped: Any = transformers
    untyped.logging.set_verbosity_error()
    untyped.logging.disable_progress_bar()
    model = untyped.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    return model.to(setup.device).eval()


def _theirs(model: Any, cache: str, device: torch.device, programs: Programs) -> _Decoder:
    import transformers

    untyped: Any = transformers

    class Clock(transformers.StoppingCriteria):  # type: ignore[misc, unused-ignore]
        """Records the time of the first decoded token. Never stops the decoding."""

        began: float | None = None

        def __call__(self, ids: Tensor, scores: Any, **words: Any) -> Tensor:
            if self.began is None:
                wait(device)
                self.began = time.perf_counter()
            return torch.zeros(len(ids), dtype=torch.bool, device=device)

    def generate(prompts: Tensor, count: int, **more: Any) -> Any:
        settings = untyped.GenerationConfig(
            max_new_tokens=count, do_sample=False, cache_implementation=cache, eos_token_id=None, pad_token_id=0
        )
        if cache == "static":
            settings.compile_config = untyped.CompileConfig()
            # Without this setting, Transformers does not compile on a CPU
            settings.compile_config._compile_all_devices = True
        return model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=settings, **more)

    @torch.no_grad()
    def logits(ids: Tensor) -> Tensor:
        result: Tensor = model(ids).logits[:, -1]
        return result.float()

    def timed_pass(prompts: Tensor, count: int) -> float:
        clock = Clock()
        texts = generate(prompts, count + 1, stopping_criteria=[clock])
        wait(device)
        assert clock.began is not None and texts.shape[1] == prompts.shape[1] + count + 1
        return 1e3 * (time.perf_counter() - clock.began) / count

    def passes(rows: int, context: int) -> Pass:
        model._cache = None  # removes a cache that was created for another size
        torch.compiler.reset()
        return timed_pass

    return _Decoder(logits, passes, programs)


def _rows(setup: Setup, decoders: Mapping[str, _Decoder], cell: _Cell, missing: dict[str, str]) -> Iterator[TextRow]:
    """Measures the decoders with the batch size and the text length of `cell`, and yields one row for each decoder.

    If a decoder cannot run, or returns wrong logits, the reason is added to `missing` instead. Raises RunFailure if the
    decoder with a paged cache and the decoder with a contiguous cache return different logits.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (cell.batch, cell.context - cell.tokens)
    ids = torch.randint(setup.spec.model.vocabulary, shape, generator=generator).to(setup.device)
    wanted: Tensor | None = None
    for name, decoder in decoders.items():
        place = f"{name}, {cell.batch} x {cell.context}"
        if decoder.most is not None and cell.batch > decoder.most:
            missing[place] = f"{place}: only steps of up to {decoder.most} texts read codes"
            continue
        try:
            logits = decoder.logits(ids if name in OWN else ids[:1])  # Transformers: one text, all tokens
            error = None if wanted is None else _difference(logits, wanted)
            wanted = logits if wanted is None else wanted
            if error is not None and not error <= cell.tolerance:
                message = f"{place}: logits differ from those of the {CONTIGUOUS} by {error:.1%} of the largest logit"
                if name in OWN:
                    raise RunFailure(message, "this is a bug in specc: report it with the spec")
                missing[place] = message
                continue
            first, *samples = _timed(decoder, ids, cell)
        except torch.OutOfMemoryError:
            missing[place] = f"{place}: out of GPU memory"
            continue
        finally:
            release(setup.device)
        token = Measured.of(samples[:1], samples[1:])
        floor_ms = cell.floor_ms(decoder.programs)
        yield TextRow(name, cell.batch, cell.context, cell.tokens, token, first, floor_ms, error)


def _timed(decoder: _Decoder, ids: Tensor, cell: _Cell) -> Iterator[float]:
    decode = decoder.passes(cell.batch, cell.context)
    began = time.perf_counter()
    decode(ids, cell.tokens)
    middle = time.perf_counter()
    each = decode(ids, cell.tokens)
    end = time.perf_counter()
    yield max(0.0, (middle - began) - (end - middle))
    yield each
    yield decode(ids, cell.tokens)


def _difference(logits: Tensor, others: Tensor) -> float:
    width = min(logits.shape[-1], others.shape[-1])
    exact = others[: len(logits), :width].double()
    return float((logits[:, :width].double() - exact).abs().max() / exact.abs().max())
