"""Captures calibration statistics of a model: GPTQ Hessians of linear inputs, and gradients of linears and lookups.

The unfused model is traced by torch.fx. Its `score` program becomes a flat list of calls that names each parameter. An
interpreter of that list observes every `F.linear` and grouped product of experts with its input and output, and every
`F.embedding`.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from specc.compiler.ops.experts.dispatch import GROUPED_LINEAR
from specc.compiler.spec.spec import Calibrate
from specc.runtime.calibration.gradients import Gradients, Lookups
from specc.runtime.calibration.hessian import Hessians, rows_of_experts
from specc.runtime.data.errors import DataError
from specc.runtime.data.windows.stream import TokenStream
from specc.runtime.errors import QuantizeError

Observe = Callable[[str, Tensor, Tensor | None], None]
Looked = Callable[[str, Tensor, Tensor], None]


class ScoreTracer(fx.Tracer):
    """Traces `score` of `model` instead of `forward`. Blocks are inlined, and loops are unrolled.

    Calls of the functions of the generated code are single nodes.
    """

    traced_func_name = "score"

    def __init__(self, model: nn.Module) -> None:
        names: Mapping[str, Any] = type(model).score.__globals__  # type: ignore[attr-defined]
        functions = (value for value in names.values() if isinstance(value, FunctionType))
        super().__init__(autowrap_functions=tuple(functions))


@dataclass(frozen=True, slots=True)
class Product:
    """A product of rows with a parameter in a traced program.

    Attributes:
        weight: the name of the parameter.
        input: the node of the rows [..., features].
        ends: for the matrices of experts, the node of `ends` i32 [experts]: for each expert, the number of rows of this
            expert and all experts before it.
    """

    weight: str
    input: fx.Node
    ends: fx.Node | None = None


class Capture(fx.Interpreter):
    """An interpreter of the `score` program that reports the inputs and outputs of linears and lookups.

    Args:
        model: the model, generated without fusions.
        observe: called with the name of the weight and the input [..., features] of each linear. The third argument is
            `ends` of `Product` for the matrices of experts, and None otherwise.
        results: called as `observe`, with the output [..., features] of each linear.
        looked: called with the name of the table, the ids [...] and the output [..., features] of each lookup.
    """

    def __init__(
        self, model: nn.Module, observe: Observe, results: Observe | None = None, looked: Looked | None = None
    ) -> None:
        super().__init__(model, graph=ScoreTracer(model).trace(model))
        self._observe, self._results, self._looked = observe, results, looked

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the weights of linears, in the order of their first use."""
        return tuple(dict.fromkeys(product.weight for product in self._products))

    @property
    def repeated(self) -> frozenset[str]:
        """The names of the weights that the program uses for the same tokens more than once, in a loop of blocks.

        Experts are not among them: in each run of a block they have other tokens.
        """
        names = [product.weight for product in self._products if product.ends is None]
        return frozenset(name for name in names if names.count(name) > 1)

    @property
    def _products(self) -> Iterator[Product]:
        return (product for node in self.graph.nodes if (product := _product(node)) is not None)

    def run_node(self, n: fx.Node) -> Any:
        product = _product(n)
        if product is not None:
            self._observe(product.weight, self.env[product.input], self.env[product.ends] if product.ends else None)
        result = super().run_node(n)
        if product is not None and self._results is not None:
            ends = self.env[product.ends] if product.ends else None
            self._results(product.weight, result, ends)
        if self._looked is not None and (lookup := _of(F.embedding, n)) is not None:
            name, ids = lookup
            self._looked(name, self.env[ids], result)
        return result


def _product(node: fx.Node) -> Product | None:
    """Returns the product that a node computes; None for other nodes, and for weights that are not parameters."""
    grouped = getattr(node.target, "__name__", "") == GROUPED_LINEAR
    operands = _of(node.target if grouped else F.linear, node)  # type: ignore[arg-type]
    if operands is None:
        return None
    ends = node.args[2] if grouped else None
    return Product(*operands, ends if isinstance(ends, fx.Node) else None)


def _of(function: Callable[..., Tensor], node: fx.Node) -> tuple[str, fx.Node] | None:
    """Returns the parameter name of the second argument of a call of `function`, and the node of the first argument.

    Returns None for other nodes, and if the second argument is not a parameter.
    """
    if node.op != "call_function" or node.target is not function:
        return None
    value, weight = node.args[0], node.args[1]
    if not (isinstance(value, fx.Node) and isinstance(weight, fx.Node) and weight.op == "get_attr"):
        return None
    return str(weight.target), value


def calibration_windows(
    stream: TokenStream, calibrate: Calibrate, window: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields batches of (ids, targets), i64 [at most `calibrate.batch`, window], `calibrate.sequences` rows in total.

    The windows start at equal distances over the whole stream, offset by a phase that depends on `seed`, so that every
    seed samples all parts of the stream equally. The windows depend only on the stream, the sizes and `seed`. Windows
    overlap if the stream is too short for all of them.

    Args:
        stream: the training text.
        calibrate: supplies `sequences` and `batch`, in rows.
        window: the length of a row in tokens.
        seed: the seed of the run.

    Returns:
        An iterator over the batches.

    Raises:
        DataError: the stream has fewer than window + 1 tokens.
    """
    places, count = stream.tokens - window, calibrate.sequences
    if places < 1:
        message = f"the stream has {stream.tokens:,} tokens; windows of length {window:,} need {window + 1:,}"
        raise DataError(message, "give more data, or a shorter length")
    # SHA-256 instead of a random generator, whose numbers may change between versions of the library.
    phase = int.from_bytes(hashlib.sha256(f"{seed} calibration".encode()).digest()) % places
    for first in range(0, count, calibrate.batch):
        starts = [(phase + i * places) // count for i in range(first, min(first + calibrate.batch, count))]
        tokens = torch.from_numpy(np.stack([stream.read(start, window + 1) for start in starts]).astype(np.int64))
        yield tokens[:, :-1], tokens[:, 1:]


def capture_hessians(
    model: nn.Module,
    windows: Iterator[tuple[Tensor, Tensor]],
    device: torch.device,
    progress: Callable[[int], None] | None = None,
) -> Mapping[str, Tensor]:
    """Returns the Hessian X^T X of each weight: summed over the calls per token, averaged over all tokens.

    Each expert has a Hessian of the rows that it multiplies, also averaged over all tokens. A weight has several calls
    per token if a loop of blocks reuses it.

    Args:
        model: the model, generated without fusions, on `device`.
        windows: batches of (ids, targets), i64 [rows, window].
        device: the device of the model and of the result.
        progress: called with the number of processed rows after each batch.

    Returns:
        The Hessians by parameter name, f64 [features, features] or [experts, features, features] on `device`.

    Raises:
        QuantizeError: an input contains NaN or infinity.
    """
    hessians = Hessians(device=device)
    capture = Capture(model, hessians.add)
    done = tokens = 0
    with torch.no_grad():
        for ids, targets in windows:
            capture.run(ids.to(device), targets.to(device))
            done += ids.shape[0]
            tokens += ids.numel()
            if progress is not None:
                progress(done)
    return hessians.a_token(tokens)


def capture_gradients(
    model: nn.Module,
    windows: Iterator[tuple[Tensor, Tensor]],
    device: torch.device,
    progress: Callable[[int], None] | None = None,
) -> Mapping[str, Gradients]:
    """Returns second moments of the gradients of the loss l, the sum of nats over all targets, by parameter.

    For the weight of a linear with outputs y, `products` is the mean of (dl/dy_i)^2 over all rows of all calls, or of
    each expert over the rows of that expert. A weight that a loop of blocks reuses has several calls per token. The
    Hessian accounts for the number of calls, because `capture_hessians` sums over calls. Except for experts, this
    function accounts for the correlation of the calls by the factor
    sum_n |sum_c g_cn x_cn^T|^2 / sum_n sum_c |g_cn x_cn^T|^2 over tokens n and calls c with inputs x and gradients g
    (Frobenius norms). For a table that is looked up, `lookups` is the result of `Lookups`. A tied table has both.

    Args:
        model: the model, generated without fusions, on `device`.
        windows: batches of (ids, targets), i64 [rows, window].
        device: the device of the model and of the result.
        progress: called with the number of processed rows after each batch.

    Returns:
        The second moments by parameter name, f64 on `device`.

    Raises:
        QuantizeError: a gradient contains NaN or infinity.
    """
    sums: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    together: dict[str, tuple[float, float]] = {}
    inputs: list[tuple[str, Tensor]] = []
    outputs: list[tuple[str, Tensor, Tensor | None]] = []
    looked: list[tuple[str, Tensor, Tensor]] = []
    lookups = Lookups()
    capture = Capture(
        model,
        lambda name, value, ends: inputs.append((name, value.detach() if name in repeated else value[:0])),
        lambda name, value, ends: outputs.append((name, value, ends)),
        lambda name, ids, value: looked.append((name, ids, value)),
    )
    repeated = capture.repeated
    done = tokens = 0
    for ids, targets in windows:
        for seen in (inputs, outputs, looked):
            seen.clear()
        with torch.enable_grad():
            nats = capture.run(ids.to(device), targets.to(device))
        values = [*(value for _, value, _ in outputs), *(value for *_, value in looked)]
        both = torch.autograd.grad(nats.sum(), values)
        gradients, of_rows = both[: len(outputs)], both[len(outputs) :]
        for (name, _, ends), gradient in zip(outputs, gradients, strict=True):
            squares = gradient.detach().flatten(0, -2).double().square()
            parts = [squares] if ends is None else rows_of_experts(squares, ends)
            sum_of_rows = torch.stack([part.sum(0) for part in parts])
            counts = squares.new_tensor([[len(part)] for part in parts])
            for totals, value in ((sums, sum_of_rows), (rows, counts)):
                value = value[0] if ends is None else value
                totals[name] = totals[name] + value if name in totals else value
        for (name, places, _), gradient in zip(looked, of_rows, strict=True):
            lookups.add(name, len(model.get_parameter(name)), places, gradient)
        for name in repeated:
            calls = [(x, g) for (other, x), g in zip(inputs, gradients, strict=True) if other == name]
            before, more = together.get(name, (0.0, 0.0)), _whole_and_alone(calls)
            together[name] = (before[0] + more[0], before[1] + more[1])
        done += ids.shape[0]
        tokens += ids.numel()
        if progress is not None:
            progress(done)
    for name, total in sums.items():
        if not bool(total.isfinite().all()):
            raise QuantizeError(f"{name}: the gradient of its output holds NaN or infinity", "calibrate otherwise")
    factors = {name: whole / alone for name, (whole, alone) in together.items() if alone}
    products = {name: total / rows[name].clamp(min=1) * factors.get(name, 1.0) for name, total in sums.items()}
    entries = {name: entry.to(device) for name, entry in lookups.a_token(tokens).items()}
    return {name: Gradients(products.get(name), entries.get(name)) for name in (products | entries)}


def _whole_and_alone(calls: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Returns two sums over tokens: of |sum_c g_c x_c^T|^2, and of sum_c |g_c x_c^T|^2.

    `calls` holds (x, g) for each call c, with x [..., input features] and g [..., output features]. Each norm is
    computed from inner products, without the outer product.
    """
    whole = alone = 0.0
    assert len({x.shape[:-1] for x, _ in calls}) == 1, "calls of one weight are of the same tokens"
    for (i, (x, g)), (j, (other, beside)) in combinations_with_replacement(enumerate(calls), 2):
        product = float((_inner(x, other) * _inner(g, beside)).sum())
        whole += product if i == j else 2 * product
        alone += product if i == j else 0.0
    return whole, alone


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a.detach().float() * b.detach().float()).sum(-1, dtype=torch.float64)
