"""Tasks that measure the perplexity of documents."""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import log
from typing import Any

from specc.runtime.data.errors import DataError
from specc.runtime.data.windows.evaluation import Windows
from specc.runtime.eval.tasks.rows import Encoder, Row, RowScore
from specc.runtime.eval.tasks.task import Measure, Task, exponential, ratio, text_of


class Text(Task):
    """Documents to score. Each line of a .jsonl file is a JSON object {"text": document}. In any other text file, each
    document is an example. Each document begins with BOS and is cut into windows.

    The measure `perplexity` is per token. lm-evaluation-harness defines the measures `word_perplexity`,
    `byte_perplexity` and `bits_per_byte`. The standard errors are computed over documents, or over windows if there is
    only one document.
    """

    name = "text"
    key = "text"

    def __init__(self, records: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        self._texts = [(where, text_of(record, "text", where)) for where, record in records]

    def rows(self, encoder: Encoder) -> list[list[Row]]:
        return [self._windows(encoder, where, text) for where, text in self._texts]

    def _windows(self, encoder: Encoder, where: str, text: str) -> list[Row]:
        bos = [] if encoder.tokenizer.bos is None else [encoder.tokenizer.bos]
        tokens = [*bos, *encoder.encoded(text, where)]
        if len(tokens) < 2:
            raise DataError(f"{where}: the text has no tokens to score", "remove the document")
        windows = Windows(len(tokens) - 1, encoder.window, encoder.stride)
        size = len(text.encode())
        rows = []
        for i in range(len(windows)):
            window = windows[i]
            part = tuple(tokens[window.start : window.start + window.length + 1])
            rows.append(Row(part, window.new, size if i == 0 else 0))
        return rows

    def measures(self, rows: Sequence[Sequence[Row]], scores: Sequence[Sequence[RowScore]]) -> Mapping[str, Measure]:
        nats = [sum(score.nats for score in parts) for parts in scores]
        tokens = [float(sum(row.scored for row in parts)) for parts in rows]
        sizes = [float(sum(row.size for row in parts)) for parts in rows]
        words = [float(len(re.split(r"\s+", text))) for _, text in self._texts]
        per_token, per_word, per_byte = (ratio(nats, units) for units in (tokens, words, sizes))
        if len(rows) == 1:
            windows = ratio([score.nats for score in scores[0]], [float(row.scored) for row in rows[0]])
            per_token, per_word, per_byte = (
                Measure(m.value, None if windows.error is None else windows.error * m.value / windows.value)
                for m in (per_token, per_word, per_byte)
            )
        bits = Measure(per_byte.value / log(2), None if per_byte.error is None else per_byte.error / log(2))
        return {
            "perplexity": exponential(per_token),
            "word_perplexity": exponential(per_word),
            "byte_perplexity": exponential(per_byte),
            "bits_per_byte": bits,
        }
