"""Captures calibration statistics of a model, such as the Hessians of the inputs of linear layers for GPTQ.

torch.fx traces the method `score` of the unfused model into a flat list of calls. An interpreter runs these calls, and
observes the inputs and outputs of every `F.linear`, every grouped matrix product of experts and every `F.embedding`.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from specc.compiler.ops.experts.dispatch import GROUPED_LINEAR
from specc.compiler.spec.spec import Calibrate
from specc.runtime.calibration.hessian import Hessians
from specc.runtime.data.errors import DataError
from specc.runtime.data.windows.stream import TokenStream

Observe = Callable[[str, Tensor, Tensor | None], None]
Looked = Callable[[str, Tensor, Tensor], None]


class ScoreTracer(fx.Tracer):
    """Traces the method `score` of a model instead of `forward`. The trace inlines blocks and unrolls loops.

    In the trace, a call of a function of the generated module model.py is a single node.
    """

    traced_func_name = "score"

    def __init__(self, model: nn.Module) -> None:
        names: Mapping[str, Any] = type(model).score.__globals__  # type: ignore[attr-defined]
        functions = (value for value in names.values() if isinstance(value, FunctionType))
        super().__init__(autowrap_functions=tuple(functions))


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of an input and a parameter, in a traced program.

    Attributes:
        weight: the name of the parameter.
        input: the node that computes the input of the product, [..., features].
        ends: the node that computes the cumulative number of rows per expert, i32 [experts]. None if the parameter does
            not belong to experts.
    """

    weight: str
    input: fx.Node
    ends: fx.Node | None = None


class Capture(fx.Interpreter):
    """An interpreter of the traced method `score` of a model. The interpreter passes the inputs and outputs of linear
    layers and embedding lookups to callbacks.

    Args:
        model: the model, generated without fusions.
        observe: called before each linear layer with the name of the weight, the input [..., features], and the value
            of the node `Product.ends`.
        results: called after each linear layer with the name of the weight, the output [..., features], and the value
            of the node `Product.ends`.
        looked: called after each embedding lookup with the name of the table, the ids [...] and the output [...,
            features].
    """

    def __init__(
        self, model: nn.Module, observe: Observe, results: Observe | None = None, looked: Looked | None = None
    ) -> None:
        super().__init__(model, graph=ScoreTracer(model).trace(model))
        self._observe, self._results, self._looked = observe, results, looked

    @property
    def names(self) -> tuple[str, ...]:
        products = (product for node in self.graph.nodes if (product := _product(node)) is not None)
        return tuple(dict.fromkeys(product.weight for product in products))

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
    grouped = getattr(node.target, "__name__", "") == GROUPED_LINEAR
    operands = _of(node.target if grouped else F.linear, node)  # type: ignore[arg-type]
    if operands is None:
        return None
    ends = node.args[2] if grouped else None
    return Product(*operands, ends if isinstance(ends, fx.Node) else None)


def _of(function: Callable[..., Tensor], node: fx.Node) -> tuple[str, fx.Node] | None:
    if node.op != "call_function" or node.target is not function:
        return None
    value, weight = node.args[0], node.args[1]
    if not (isinstance(value, fx.Node) and isinstance(weight, fx.Node) and weight.op == "get_attr"):
        return None
    return str(weight.target), value


def calibration_windows(
    stream: TokenStream, calibrate: Calibrate, window: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields `calibrate.sequences` rows in batches (ids, targets) of `calibrate.batch` rows, i64 [rows, window] each.

    A row is a window of the stream. The windows start at equal distances over the whole stream, at an offset that
    `seed` determines. If the stream is short, the windows overlap.

    Args:
        stream: the training text.
        calibrate: the calibration settings, of which only `sequences` and `batch` are used.
        window: the length of a row in tokens.
        seed: the seed of the run.

    Returns:
        An iterator over the batches.

    Raises:
        DataError: if the stream has fewer than window + 1 tokens.
    """
    places, count = stream.tokens - window, calibrate.sequences
    if places < 1:
        message = f"the stream has {stream.tokens:,} tokens; windows of length {window:,} need {window + 1:,}"
        raise DataError(message, "give more data, or a shorter length")
    # SHA-256, because the numbers of a random generator may change between versions of a library
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
    """Runs the model on calibration text, and returns the Hessian of each weight.

    The Hessian is X^T X, averaged over all tokens. The rows of X are the inputs of the weight. If a block runs more
    than once per token, its Hessians are sums over all calls. For a weight of experts, each expert has a separate
    Hessian of the rows that the expert receives. This Hessian is also an average over all tokens.

    Args:
        model: the model, generated without fusions, on `device`.
        windows: batches (ids, targets), i64 [rows, window] each.
        device: the device of the model and of the result.
        progress: called after each batch with the number of rows processed so far.

    Returns:
        The Hessians by parameter name, f64 [features, features] or [experts, features, features] on `device`.

    Raises:
        QuantizeError: if an input contains NaN or infinity.
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
    return hessians.per_token(tokens)
