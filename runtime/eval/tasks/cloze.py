"""Cloze tasks, such as LAMBADA: the model predicts the end of a text from its beginning."""

from collections.abc import Iterable, Mapping, Sequence
from math import log
from typing import Any

from specc.runtime.data.errors import DataError
from specc.runtime.eval.tasks.rows import Encoder, Row, RowScore
from specc.runtime.eval.tasks.task import HINT, Measure, Task, exponential, mean, ratio, text_of


class Cloze(Task):
    """Texts whose end the model predicts. Each line of the file is a JSON object {"context": text, "target": text,
    "delimiter": text}. If a line has no "delimiter", the delimiter is a space.

    The measure `acc` is the fraction of lines whose target equals the text that greedy decoding returns. `perplexity`
    is exp(mean loss of a whole target in nats). lm-evaluation-harness defines both measures.
    """

    name = "cloze"
    key = "target"
    greedy = True

    def __init__(self, records: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        self._lines: list[tuple[str, str, str]] = []
        for where, record in records:
            context, target = text_of(record, "context", where), text_of(record, "target", where)
            if not target:
                raise DataError(f'{where}: "target" is empty', HINT)
            self._lines.append((where, context, text_of(record, "delimiter", where, " ") + target))

    def rows(self, encoder: Encoder) -> list[list[Row]]:
        return [[encoder.continuation(context, text, where)] for where, context, text in self._lines]

    def measures(self, rows: Sequence[Sequence[Row]], scores: Sequence[Sequence[RowScore]]) -> Mapping[str, Measure]:
        nats = [score.nats for (score,) in scores]
        sizes = [float(row.size) for (row,) in rows]
        return {
            "acc": mean([float(score.greedy) for (score,) in scores]),
            "perplexity": exponential(mean(nats)),
            "bits_per_byte": ratio([each / log(2) for each in nats], sizes),
        }
