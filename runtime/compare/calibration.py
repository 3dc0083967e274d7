"""Measures the calibration of a model: whether its probabilities agree with the frequencies of correct predictions.

The measure is the expected calibration error of the most probable token (ECE; Guo et al., 2017, "On Calibration of
Modern Neural Networks"). The target of a prediction is the token that follows in the validation text. A prediction is
correct if its most probable token equals the target. Let p be the probability of the most probable token. The
predictions are divided by p into 15 bins of equal width. In each bin, the mean of p is compared with the fraction of
correct predictions:

    ECE = sum over bins of (targets in the bin / all targets) * |fraction of correct predictions - mean p|
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specc.runtime.data.windows.evaluation import Batch
from specc.runtime.data.windows.stream import open_stream
from specc.runtime.decode.pages import decoder_of
from specc.runtime.errors import RunFailure
from specc.runtime.eval.options import EvaluateError, EvaluateOptions, windows_of
from specc.runtime.metrics.bits_per_byte import Account, ScoredText
from specc.runtime.open_model import OpenedModel, token_cache

BINS = 15


@dataclass(frozen=True, slots=True)
class Bin:
    """The predictions for which the probability of the most probable token is greater than `low` and at most `high`.

    Attributes:
        low, high: the limits of the probability.
        count: the number of predictions in the bin.
        confidence: the mean of the probability of the most probable token; 0 in an empty bin.
        accuracy: the fraction of predictions whose most probable token equals the target; 0 in an empty bin.
    """

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The calibration of a model on a text.

    Attributes:
        tokens: the number of target tokens. The model predicts each target once.
        ece: the expected calibration error, 0 to 1.
        accuracy: the fraction of targets that equal the most probable token of their prediction.
        confidence: the mean of the probability of the most probable token.
        nats: the mean loss in nats per token, computed from the same probabilities as `bins`.
        bins: the statistics of each bin, from low to high probability.
    """

    tokens: int
    ece: float
    accuracy: float
    confidence: float
    nats: float
    bins: tuple[Bin, ...]

    def facts(self) -> dict[str, Any]:
        return asdict(self)


class Tally:
    """Counts predictions and correct predictions in bins. The probability of the most probable token selects
    the bin.
    """

    def __init__(self) -> None:
        # For each bin: the number of targets, the sum of probabilities, and the number of correct predictions
        self._sums = np.zeros((BINS, 3))
        self._nats = 0.0

    def add(self, logits: Tensor, targets: Tensor, counts: Tensor) -> None:
        """Adds the predictions of a batch.

        Args:
            logits: the logits of B predictions, [B, vocabulary].
            targets: the ids of the tokens that should be predicted, i64 [B].
            counts: whether each prediction is included, bool [B].
        """
        exact = logits[counts].double().log_softmax(-1)
        best, token = exact.max(-1)
        confidence, right = best.exp().cpu().numpy(), (token == targets[counts]).cpu().numpy()
        places = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
        for column, weights in enumerate((np.ones(len(places)), confidence, right.astype(float))):
            self._sums[:, column] += np.bincount(places, weights, BINS)
        self._nats -= float(exact.gather(-1, targets[counts][:, None]).sum())

    def result(self) -> Calibration:
        tokens = int(self._sums[:, 0].sum())
        bins = tuple(
            Bin(i / BINS, (i + 1) / BINS, int(n), total / n if n else 0.0, right / n if n else 0.0)
            for i, (n, total, right) in enumerate(self._sums.tolist())
        )
        ece = sum(entry.count * abs(entry.accuracy - entry.confidence) for entry in bins) / tokens
        _, confidence, accuracy = (self._sums.sum(0) / tokens).tolist()
        return Calibration(tokens, ece, accuracy, confidence, self._nats / tokens, bins)


def calibration_of(
    opened: OpenedModel, max_tokens: int | None, progress: Callable[[int, int], None] | None = None
) -> Calibration:
    """Measures the calibration of a text model on the validation split of its data.

    Decoding with a cache computes the logits. The split is divided into windows that do not overlap. A window has the
    length of the context of the model.

    Args:
        opened: the text model.
        max_tokens: the number of tokens to predict, from the start of the split. None predicts all tokens.
        progress: called with the number of tokens predicted so far, and the total number of tokens to predict.

    Returns:
        The calibration of the model.

    Raises:
        EvaluateError: if the model is not a text model, or its data are unknown.
        RunFailure: if the logits are not finite.
        DataError: if the data cannot be read.
    """
    if opened.data is None:
        raise EvaluateError(f"{opened.path} does not state its training data", "name a run")
    plan = windows_of(opened.spec, EvaluateOptions(stride=opened.spec.model.window), str(opened.path))
    tally, first = Tally(), opened.spec.model.unscored + 1
    stream = open_stream(opened.data, "val", opened.tokenizer, token_cache())
    try:
        account = Account(ScoredText(stream, opened.tokenizer, max_tokens), plan)
        (chunk,) = account.chunks
        total, done = account.windows.last, 0
        decoder = decoder_of(opened.text_model, opened.spec.model.window, opened.device, plan.batch)
        for number in chunk:
            batch = account.read(number)
            _add(decoder, batch, first, tally, opened.device)
            done += int(batch.new.sum())
            if progress is not None:
                progress(done, total)
    finally:
        stream.close()
    result = tally.result()
    if not np.isfinite(result.nats):
        raise RunFailure(f"{opened.path}: the logits contain NaN or infinity", "try an earlier checkpoint")
    return result


def _add(decoder: Any, batch: Batch, first: int, tally: Tally, device: torch.device) -> None:
    ids, targets, new = (torch.from_numpy(array.copy()).to(device) for array in (batch.ids, batch.targets, batch.new))
    logits = decoder.prefill(ids[:, :first])
    for place in range(first - 1, ids.shape[1]):
        if place >= first:
            logits = decoder.append(ids[:, place])
        tally.add(logits, targets[:, place], new[:, place])
