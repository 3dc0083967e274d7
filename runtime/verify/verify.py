"""Verifies generated code: checks the structure with torch.fx, and values and gradients with f64 references."""

import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.compiler import pipeline
from specc.compiler.expr import reread, variables
from specc.compiler.expr.grid import GRID, deviations
from specc.compiler.expr.mask import window_of
from specc.compiler.ir.types import TensorType
from specc.compiler.kernels.kernel import Rendered, Site
from specc.compiler.ops.attention import Sdpa
from specc.compiler.ops.caches.cached_attention import SdpaCached
from specc.compiler.ops.dropout import Dropout
from specc.compiler.ops.fp8 import HISTORY, MOST, SCALES, Fp8Linear
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.pooled.attention import SdpaPooled, SdpaPooledCached
from specc.compiler.ops.saved_attention import IDS, starts_of
from specc.compiler.plan.lock import NO_LOCK, Lock
from specc.compiler.programs import fx_witness as witness
from specc.compiler.programs import reference
from specc.compiler.programs.programs import Programs
from specc.compiler.render.program import METHODS
from specc.compiler.spec.spec import Spec
from specc.compiler.targets import TARGETS
from specc.runtime.dtypes import DTYPES
from specc.runtime.model.load import Loaded, device_of, instantiate, unavailable
from specc.runtime.model.parameters import place
from specc.runtime.verify.judge import FEW, Composed, Errors, Judge, inputs_of, sizes_of
from specc.runtime.verify.random_inputs import random_tensor
from specc.runtime.verify.reduced import reduced
from specc.runtime.verify.step_by_step import STEPPED, ExactModel

ATTENTION_ERROR = 1e-10  # the largest allowed error of attention in f64
# The largest allowed relative error, in the Frobenius norm, of products of 8-bit floats with 3 and 2 mantissa bits
ROUNDED = 0.08
FEW_ROUNDED = 2.0  # the factor of ROUNDED for results with few numbers, whose errors may add up by chance
# The largest allowed relative difference between products of 8-bit floats and their emulation, by the dtype of the
# result
EMULATED = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
# The largest allowed error of a gradient, relative to the larger of two norms. One norm is the norm of the gradient.
# The other norm is SHARE times the norm of the largest gradient. The limit does not depend on the error of the unfused
# module, because both modules may contain the same wrong function.
LIMITS = {torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.5}
# The limits for gradients if the program has products of 8-bit floats. A rounding error of an input may change a code.
# FEW_CODED applies to gradients with few numbers, and CODED to all other gradients.
CODED, FEW_CODED = 0.5, 0.9
SHARE = 0.01
# The limit for the loss, as a fraction of LIMITS. The error of the loss is smaller, because the loss is a mean over all
# tokens.
LOSS_SHARE = 0.1
DRAWS = 8  # the number of random sign vectors that estimate the magnitude of the terms of a sum


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        target: the name of the target.
        name: the name of the check.
        ok: True if the check passed, False if it failed, None if this machine cannot run the check.
        detail: the measured values, or the reason why the check failed or was not run.
    """

    target: str
    name: str
    ok: bool | None
    detail: str


def verify(spec: Spec, targets: tuple[str, ...], seed: int = 0, lock: Lock = NO_LOCK) -> Iterator[Check]:
    """Runs all checks of a spec, target by target, and yields the results.

    If a spec has more than 200 million parameters, its code is only generated and loaded. All other checks use a
    smaller spec (see reduced.py). If a check needs another machine, its `ok` is None.

    Args:
        spec: the spec to verify.
        targets: the names of the targets.
        seed: the seed of the random parameters and inputs.
        lock: the kernels that `specc tune` measured as the fastest.

    Returns:
        An iterator over the results, in the order of `targets`.

    Raises:
        ModuleNotFoundError: if a module of specc itself is missing.
    """
    if (small := reduced(spec)) is not None:
        for target in targets:
            yield _full_size(spec, target, lock)
        spec = small
    for target in targets:
        reason = unavailable(TARGETS[target])
        with tempfile.TemporaryDirectory(prefix="specc-verify-") as folder:
            plain = instantiate(spec, target, Path(folder) / "plain", fuse=False)
            try:
                fused = instantiate(spec, target, Path(folder) / "fused", lock=lock)
            except ModuleNotFoundError as error:
                if error.name is None or error.name.partition(".")[0] == __name__.partition(".")[0]:
                    raise
                yield Check(target, "fx, values, kernels, causality, fused", None if reason else False, str(error))
                yield from traces(plain, "fuse: []")
                continue
            yield from traces(fused, "fused")
            yield from traces(plain, "fuse: []")
            yield from _magnitudes(plain)
            if reason:
                yield Check(target, "values, kernels, causality", None, reason)
                continue
            torch.manual_seed(seed)
            _fill(fused, plain)
            yield from _values(spec, fused, plain)
            yield from _kernels(spec, fused, lock)
            yield from _attention(plain, seed)
            yield from _products_of_8_bits(plain, seed)
            yield from _causality(fused)
            yield from _cache(spec, fused)
            yield from _documents(spec, fused)


def _full_size(spec: Spec, target: str, lock: Lock) -> Check:
    """Checks that the generated module of a large spec loads, and has the parameters of the plan.

    The check needs no memory for the values of the parameters.
    """
    name = "full size"
    with tempfile.TemporaryDirectory(prefix="specc-verify-") as folder, torch.device("meta"):
        try:
            loaded = instantiate(spec, target, Path(folder), lock=lock)
        except ModuleNotFoundError as error:
            return Check(target, name, False if unavailable(TARGETS[target]) is None else None, str(error))
    planned = {param.name: param.shape for param in loaded.programs.params}
    held = {name: tuple(parameter.shape) for name, parameter in loaded.model.named_parameters()}
    different = sorted(name for name in planned.keys() | held.keys() if planned.get(name) != held.get(name))
    count = f"{sum(param.count for param in loaded.programs.params):,} parameters in {len(planned)} tensors"
    detail = f"{different[0]} differs from the plan" if different else f"builds and loads, {count} as planned"
    return Check(target, name, not different, f"{detail}; the other checks use a reduced spec")


def traces(loaded: Loaded, name: str) -> Iterator[Check]:
    """Traces every program for whole sequences with torch.fx, and checks that it has the nodes and types of the plan.

    `name` is the name of the module in the results, such as "fused".
    """
    model, source = loaded.model, sys.modules[type(loaded.model).__module__]
    for program in loaded.programs.whole:
        try:
            graph = witness.trace(model, source, METHODS.get(program, program))
            nodes = witness.round_trip(loaded.programs, program, graph)
            types = witness.check_types(loaded.programs, program, graph, model, 2, 16)
        except witness.Mismatch as error:
            yield Check(loaded.target.name, f"fx {program}, {name}", False, str(error))
        else:
            detail = f"{nodes} nodes equal the plan's, {types} types"
            yield Check(loaded.target.name, f"fx {program}, {name}", True, detail)


def _magnitudes(plain: Loaded) -> Iterator[Check]:
    """Checks pointwise expressions and their gradients on values of all magnitudes.

    The expressions are computed in the same way as in fused kernels.
    """
    expressions: set[tuple[str, tuple[str, ...]]] = set()
    for graph in plain.programs.graphs:
        for node in graph.nodes:
            if isinstance(node.op, Pointwise):
                operands = zip(node.op.variables, node.inputs, strict=True)
                floats = {name for name, ref in operands if DTYPES[graph.types[ref].dtype].is_floating_point}
                for text in node.op.outputs:
                    expressions.add((text, tuple(name for name in variables(reread(text)) if name in floats)))
    checked = sorted((text, wrt) for text, wrt in expressions if wrt and {"d", "y"}.isdisjoint(variables(reread(text))))
    problems = [f"{text}: {problem}" for text, wrt in checked for problem in deviations(reread(text), wrt)]
    detail = "; ".join(problems) or f"{len(checked)} expressions agree with float64 autograd up to {max(GRID):g}"
    yield Check(plain.target.name, "expressions at all magnitudes", not problems, detail)


def _fill(fused: Loaded, plain: Loaded) -> None:
    device = torch.device(device_of(fused.target))
    dtypes = {param.name: DTYPES[param.dtype] for param in fused.programs.params}
    tensors = {}
    for param in fused.programs.params:
        spread = 1.0 if len(param.shape) < 2 else (3.0 / param.shape[-1]) ** 0.5
        tensors[param.name] = torch.randn(param.shape) * spread
    for loaded in (fused, plain):
        with torch.no_grad():
            for name, parameter in loaded.model.named_parameters():
                parameter.copy_(tensors[name])
        place(loaded.model, dtypes, device)


def _dtype(loaded: Loaded) -> str:
    return loaded.programs.params[0].dtype


def _batch(loaded: Loaded, program: str, rows: int, tokens: int) -> dict[str, Tensor]:
    return batch_of(loaded.spec, loaded.programs, program, rows, tokens, device_of(loaded.target))


def batch_of(spec: Spec, programs: Programs, program: str, rows: int, tokens: int, device: str) -> dict[str, Tensor]:
    """Returns random inputs of a program: token ids, and weights for the terms of the loss.

    Args:
        spec: the spec, for the vocabulary size.
        programs: the lowered programs.
        program: the name of the program.
        rows: the number of rows.
        tokens: the number of tokens per row.
        device: the device of the inputs.

    Returns:
        The inputs by name. Token ids are i64 [rows, tokens], and weights are f32 [].
    """
    return {
        name: torch.randint(spec.model.vocabulary, (rows, tokens), device=device)
        if not type.floating
        else torch.rand((), device=device)
        for name, type in programs.program(program).inputs
    }


def _drops(loaded: Loaded) -> bool:
    nodes = (node for graph in loaded.programs.graphs for node in graph.nodes)
    return any(isinstance(node.op, Dropout) and not node.op.counted for node in nodes)


def _values(spec: Spec, fused: Loaded, plain: Loaded) -> Iterator[Check]:
    """Checks the loss and all gradients of the fused module against f64 references.

    The errors of the unfused module show the effect of rounding alone. If dropout masks come from the random number
    generator of Torch, the program `score` is checked instead of `train`. In the gradient of a parameter with few
    elements, the terms of the sum over tokens may cancel. The error of such a gradient is therefore reported
    separately, relative to the magnitude of the terms.
    """
    program = "score" if _drops(fused) else "train"
    inputs = _batch(fused, program, 2, sample_tokens(spec, 48))
    # These programs include the parts that exist only in training: dropout and 8-bit products.
    programs = pipeline.run(spec.plain, fused.target.name, "fp8_products")
    exact = {name: p.detach().double().requires_grad_() for name, p in plain.model.named_parameters()}
    for name, type in programs.buffers:
        buffer = plain.model.get_buffer(name)
        exact[name] = buffer.double() if type.floating else buffer
    loss = reference.run(programs, program, inputs, exact)["loss"].mean()
    loss.backward()  # type: ignore[no-untyped-call]
    exact = {name: value for name, value in exact.items() if value.requires_grad}
    truth = {name: _gradient(tensor) for name, tensor in exact.items()}
    largest = max(tensor.norm().item() for tensor in truth.values())
    least = dict.fromkeys(truth, 1e-5 * largest)
    few = {path for path, value in exact.items() if value.numel() <= FEW}
    for path, size in _term_sizes(programs, inputs, {path: exact[path] for path in few}, exact).items():
        least[path] = max(least[path], size)
    losses: dict[str, float] = {}
    errors: dict[str, dict[str, float]] = {}
    wrong: dict[str, float] = {}
    for name, loaded in (("fused", fused), ("plain", plain)):
        loaded.model.zero_grad()
        run: Any = loaded.model if program == "train" else loaded.model.score
        mean = run(*inputs.values()).mean()
        mean.backward()
        errors[name] = {}
        for path, parameter in loaded.model.named_parameters():
            gradient, floor = _gradient(parameter), max(least[path], SHARE * largest)
            errors[name][path] = _relative(gradient, truth[path], least[path])
            wrong[path] = max(wrong.get(path, 0.0), _relative(gradient, truth[path], floor))
        losses[name] = abs(mean.item() - loss.item()) / abs(loss.item())
        loaded.model.zero_grad()
    target = fused.target.name
    dtype = DTYPES[_dtype(fused)]
    detail = f"relative error {losses['fused']:.1e}; unfused {losses['plain']:.1e}"
    ok = Composed(losses["fused"], losses["plain"]).ok(dtype, count=1) and losses["fused"] <= LOSS_SHARE * LIMITS[dtype]
    yield Check(target, "loss against float64", ok, detail)
    coded = any(isinstance(node.op, Fp8Linear) for graph in programs.graphs for node in graph.nodes)
    for title, paths, count in (("gradients", exact.keys() - few, FEW + 1), ("gradients of few numbers", few, FEW)):
        if not paths:
            continue
        worst, at = max((errors["fused"][path], path) for path in paths)
        plainly = max(errors["plain"][path] for path in paths)
        detail = f"worst {worst:.1e} at {at}; unfused {plainly:.1e}"
        limit = max(LIMITS[dtype], (FEW_CODED if count == FEW else CODED) * coded)
        ok = Composed(worst, plainly).ok(dtype, count=count) and max(wrong[path] for path in paths) <= limit
        yield Check(target, f"{title} against float64", ok, detail)


def _term_sizes(
    programs: Programs, inputs: Mapping[str, Tensor], few: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> dict[str, float]:
    """Estimates the magnitude of the terms in the gradients of the parameters `few`.

    A gradient is a sum with one term per token. The magnitude is the square root of the sum of the squared terms. The
    function estimates the magnitude from sums in which the terms have random signs (Hutchinson's estimator).
    """
    if not few:
        return {}
    scored = {name: inputs[name] for name, _ in programs.program("score").inputs}
    nats = reference.run(programs, "score", scored, weights)["loss"]
    generator, squares = torch.Generator().manual_seed(0), dict.fromkeys(few, 0.0)
    for _ in range(DRAWS):
        signs = torch.randint(2, nats.shape, generator=generator).to(nats) * 2 - 1
        gradients = torch.autograd.grad((nats * signs).mean(), [*few.values()], retain_graph=True, allow_unused=True)
        for path, gradient in zip(few, gradients, strict=True):
            squares[path] += 0.0 if gradient is None else gradient.square().sum().item() / DRAWS
    return {path: square**0.5 for path, square in squares.items()}


def _gradient(parameter: Tensor) -> Tensor:
    return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)


def _relative(gradient: Tensor, exact: Tensor, least: float) -> float:
    """Returns |gradient - exact| / max(|exact|, least) in the Frobenius norm; infinity if the error is NaN.

    `least` is a lower limit of the denominator, because some gradients are 0 except for rounding.
    """
    error = ((gradient.double() - exact).norm() / exact.norm().clamp_min(least)).item()
    return error if error == error else float("inf")


def _kernels(spec: Spec, loaded: Loaded, lock: Lock) -> Iterator[Check]:
    source = sys.modules[type(loaded.model).__module__]
    plan = pipeline.plan(spec, loaded.target.name, "", lock)
    for choice in plan.generated:
        yield from _kernel(choice.site, choice.rendered, vars(source)[plan.called(choice)], loaded)


def _kernel(site: Site, rendered: Rendered, function: Any, loaded: Loaded) -> Iterator[Check]:
    generator = torch.Generator().manual_seed(7)
    counts = [1, 7, 64, 129, *torch.randint(1, 700, (4,), generator=generator).tolist()]
    device = device_of(loaded.target)
    errors: list[Errors] = []
    for rows in counts:
        judge = Judge.of(site, inputs_of(site, sizes_of(site, rows), device, seed=rows))
        errors += judge.errors(judge.call(function))
    # For the numbers of rows above, each multiprocessor computes at most one tile
    if (many := Judge.many(site, device)) is not None:
        counts.append(many.inputs[0].shape[:2].numel())
        errors += many.errors(many.call(function))
    rms, peak = (max(each) for each in zip(*((error.rms, error.peak) for error in errors), strict=True))
    detail = f"rows {counts}: RMS error {rms:.2f}x eager's, maximum {peak:.2f}x"
    yield Check(loaded.target.name, f"kernel {rendered.module}", all(error.ok for error in errors), detail)


def _attention(loaded: Loaded, seed: int) -> Iterator[Check]:
    module = sys.modules[type(loaded.model).__module__]
    calls: dict[str, tuple[Sdpa | SdpaPooled, tuple[TensorType, ...]]] = {}
    for graph in loaded.programs.graphs:
        for node in graph.nodes:
            if isinstance(node.op, Sdpa | SdpaPooled) and not node.op.causal:
                types = tuple(graph.types[ref] for ref in node.inputs)
                call = node.op.call(types)
                assert call is not None
                calls[call.function] = node.op, types
    device, generator = device_of(loaded.target), torch.Generator().manual_seed(seed)
    for function, (op, types) in calls.items():
        heads = int(op.parsed(types[0].shape[-2])[1].heads)
        span = sum(window_of(op.mask, heads, loaded.spec.model.window) or (0, 40))
        worst, shapes = 0.0, []
        for _ in range(3):
            tokens = min(loaded.spec.model.window, span + int(torch.randint(1, 60, (), generator=generator)))
            rows = int(torch.randint(1, 4, (), generator=generator))
            values = [
                random_tensor(type, {"B": rows, "T": tokens}, generator, lambda _: IDS).to(device) for type in types
            ]
            values = [value.double() if value.is_floating_point() else starts_of(value) for value in values]
            exact = op.reference(*values)
            assert isinstance(exact, Tensor)
            with _in_float64():
                output = getattr(module, function)(*values)
            worst = max(worst, (output - exact).abs().max().item())
            shapes.append(f"{rows} x {tokens}")
        detail = f"{op.description}: largest error {worst:.1e} in f64, for {', '.join(shapes)} tokens"
        yield Check(loaded.target.name, f"{function} against float64", worst <= ATTENTION_ERROR, detail)


@contextmanager
def _in_float64() -> Iterator[None]:
    """A context manager in which functions of integer tensors return float64, for example the logarithm of a
    distance.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _products_of_8_bits(loaded: Loaded, seed: int) -> Iterator[Check]:
    module = sys.modules[type(loaded.model).__module__]
    sites: dict[tuple[Fp8Linear, tuple[Any, ...]], None] = {}
    for graph in loaded.programs.graphs:
        for node in graph.nodes:
            if isinstance(node.op, Fp8Linear):
                sites[node.op, graph.types[node.inputs[1]].shape] = None
    device, dtype = device_of(loaded.target), DTYPES[_dtype(loaded)]
    for op, (n, k) in sites:
        generator = torch.Generator().manual_seed(seed)
        x, weight, dy = (torch.randn(shape, generator=generator) for shape in ((2, 64, k), (n, k), (2, 64, n)))
        given = [value.to(device, dtype) for value in (x, weight / k**0.5, dy / 128)]
        state = [torch.zeros(HISTORY, len(given), device=device)] if op.delayed else []
        for values in state:
            values[SCALES] = torch.stack([value.abs().amax() for value in given]) / torch.tensor(MOST).to(device)
        words = {"by_rows": True} if op.by_rows else {}
        have = _with_gradients(partial(module.fp8_linear, **words), given, state)
        emulated = _with_gradients(op.reference, [value.float() for value in given], state)
        exact = _with_gradients(lambda a, b: a @ b.T, [value.double() for value in given], ())
        near, far = (
            [_relative(a, b.double(), 0.0) for a, b in zip(have, other, strict=True)] for other in (emulated, exact)
        )
        limits = [ROUNDED * (FEW_ROUNDED if value.numel() <= FEW else 1.0) for value in exact]
        ok = max(near) <= EMULATED.get(dtype, 1e-5) and all(
            error <= limit for error, limit in zip(far, limits, strict=True)
        )
        errors = ", ".join(f"{name} {error:.1e}" for name, error in zip(("y", "dx", "dw"), far, strict=True))
        detail = f"{errors} against float64; at most {max(near):.1e} against the emulation in f32"
        yield Check(loaded.target.name, f"{op.words}, {n} x {k}", ok, detail)


def _with_gradients(function: Callable[..., Any], given: Sequence[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
    x, weight = (value.detach().requires_grad_() for value in given[:2])
    y = function(x, weight, *state)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), given[2])]


def _documents(spec: Spec, loaded: Loaded) -> Iterator[Check]:
    marks = {mark for _, mark in spec.model.marks}
    if len(marks) != 1:
        return
    (mark,) = marks
    tokens = min(spec.model.window, 48)
    if tokens // 4 <= spec.model.unscored:  # as a single document, a quarter of the row would have no scored token
        return
    inputs = _batch(loaded, "score", 1, tokens)
    ids, targets = inputs.values()
    ids[ids == mark] = (mark + 1) % spec.model.vocabulary
    begins = [0, *(tokens * k // 4 + k for k in (1, 2, 3)), tokens]
    ids[:, begins[:-1]] = mark
    exact = {name: parameter.detach().double() for name, parameter in loaded.model.named_parameters()}
    programs = pipeline.lower(spec.plain, loaded.target.name)

    def scores(score: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        parts = [score(ids[:, a:b], targets[:, a:b]) for a, b in itertools.pairwise(begins)]
        return score(ids, targets).double(), torch.cat(parts, 1).double()

    names = list(inputs)
    with torch.no_grad():
        packed, alone = scores(
            lambda *x: reference.run(programs, "score", dict(zip(names, x, strict=True)), exact)["loss"]
        )
        if (packed - alone).abs().max() > 1e-6:  # this spec has a part that reads other documents
            return
        have, apart = scores(loaded.model.score)  # type: ignore[arg-type]
    error, noise = ((value - alone).abs().max().item() for value in (have, apart))
    detail = f"largest error {error:.1e} nats against float64 of single documents; unpacked {noise:.1e}"
    yield Check(loaded.target.name, "packed documents equal single documents", error <= 3 * noise + 1e-5, detail)


def _causality(loaded: Loaded) -> Iterator[Check]:
    tokens = sample_tokens(loaded.spec, 128)
    inputs, name = _batch(loaded, "score", 2, tokens), loaded.spec.model.scored_input
    scale = 1e-5 if _dtype(loaded) == "f32" else 1e-2
    leak, moved = 0.0, True
    with torch.no_grad():
        before = loaded.model.score(*inputs.values())  # type: ignore[operator]
        for j in sorted({0, 1, tokens // 3, tokens // 2, tokens - 1}):
            changed = inputs[name].clone()
            changed[:, j] = (changed[:, j] + 1) % loaded.spec.model.vocabulary
            again = {**inputs, name: changed}
            difference = (loaded.model.score(*again.values()) - before).abs()  # type: ignore[operator]
            leak = max(leak, difference[:, :j].max().item() if j else 0.0)
            moved = moved and bool(difference[:, j:].max() > 0)
    detail = f"changing token j moved scores before j by at most {leak:.1e}" + ("" if moved else "; but none from j on")
    yield Check(loaded.target.name, "causality", leak <= scale and moved, detail)


def _cache(spec: Spec, loaded: Loaded) -> Iterator[Check]:
    """Checks that token-by-token decoding with a cache computes the same scores as the whole sequence.

    The largest error of decoding, relative to f64, may be three times the largest error of scoring whole sequences. If
    the cache stores quantized codes, the limit increases by twice the error of this quantization.
    """
    programs = pipeline.lower(spec.plain, loaded.target.name)
    ops = (node.op for graph in programs.graphs for node in graph.nodes)
    rings = [sum(op.ring) for op in ops if isinstance(op, SdpaCached | SdpaPooledCached) and op.ring is not None]
    tokens = sample_tokens(spec, max((64, *(2 * rows + 9 for rows in rings))))  # decodes beyond every window
    inputs = _batch(loaded, "score", 2, tokens)
    model: Any = loaded.model
    exact = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    stepped = next(STEPPED[program.name] for program in programs.programs if program.name in STEPPED)
    with torch.no_grad():
        truth = reference.run(programs, "score", inputs, exact)["loss"]
        noise = (model.score(*inputs.values()).double() - truth).abs().max().item()
        read, nats = stepped(model, tokens, spec.model.unscored + 1, *inputs.values())
        codes = any(type.dtype == "u8" for program in programs.programs for _, type in program.inputs)
        rounding = 0.0
        if codes:
            _, rounded = stepped(ExactModel(programs, exact), tokens, spec.model.unscored + 1, *inputs.values())
            rounding = (rounded - truth[:, read]).abs().max().item()
    error = (nats.double() - truth[:, read]).abs().max().item()
    detail = f"largest error {error:.1e} nats against float64; uncached {noise:.1e}"
    detail += f"; the codes of the cache alone {rounding:.1e}" if codes else ""
    yield Check(loaded.target.name, "cached equals uncached", error <= 3 * noise + 2 * rounding + 1e-5, detail)


def sample_tokens(spec: Spec, tokens: int) -> int:
    """Returns the length of a random text for checks.

    The length is the smaller of `tokens` and the context. The length is larger if the model leaves a long prefix of a
    text unscored.
    """
    return min(spec.model.window, max(tokens, 2 * (spec.model.unscored + 1)))
