"""Multiple-choice tasks, such as HellaSwag, ARC and PIQA."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np

from specc.runtime.data.errors import DataError
from specc.runtime.eval.tasks.rows import Encoder, Row, RowScore
from specc.runtime.eval.tasks.task import HINT, Measure, Task, mean, ratio, text_of


@dataclass(frozen=True, slots=True)
class _Question:
    where: str
    context: str
    delimiter: str
    choices: tuple[str, ...]
    answer: int


class Choices(Task):
    """Multiple-choice questions. Each line of the file is a JSON object {"context": text, "choices": [texts], "answer":
    index of a choice, from 0, "delimiter": text}. If a line has no "delimiter", the delimiter is a space.

    Each choice is scored after the context and the delimiter. The measure `acc` is the fraction of questions for which
    the answer has the largest log likelihood of all choices. For `acc_norm`, each log likelihood is divided by the
    number of characters of the choice. lm-evaluation-harness defines both measures. `bits_per_byte` is computed over
    the answers.
    """

    name = "choices"
    key = "choices"

    def __init__(self, records: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        self._questions = [_question(where, record) for where, record in records]

    def rows(self, encoder: Encoder) -> list[list[Row]]:
        return [
            [encoder.continuation(q.context, q.delimiter + choice, q.where) for choice in q.choices]
            for q in self._questions
        ]

    def measures(self, rows: Sequence[Sequence[Row]], scores: Sequence[Sequence[RowScore]]) -> Mapping[str, Measure]:
        best, normalized, bits, sizes = [], [], [], []
        for question, parts, results in zip(self._questions, rows, scores, strict=True):
            likelihoods = -np.array([result.nats for result in results])
            lengths = np.array([len(choice) for choice in question.choices])
            best.append(float(np.argmax(likelihoods) == question.answer))
            normalized.append(float(np.argmax(likelihoods / lengths) == question.answer))
            bits.append(results[question.answer].nats / log(2))
            sizes.append(float(parts[question.answer].size))
        return {"acc": mean(best), "acc_norm": mean(normalized), "bits_per_byte": ratio(bits, sizes)}


def _question(where: str, record: Mapping[str, Any]) -> _Question:
    context, delimiter = text_of(record, "context", where), text_of(record, "delimiter", where, " ")
    choices, answer = record["choices"], record.get("answer")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise DataError(f'{where}: "choices" must be a list of at least two texts, none of them empty', HINT)
    if not isinstance(answer, int) or isinstance(answer, bool):
        what = f"{answer!r}" if "answer" in record else "missing"
        raise DataError(f'{where}: "answer" must be the index of a choice, but is {what}', HINT)
    if not 0 <= answer < len(choices):
        last, hint = len(choices) - 1, "it is the index of the right choice, counted from 0"
        raise DataError(f'{where}: "answer" is {answer}, but the choices are 0 .. {last}', hint)
    return _Question(where, context, delimiter, tuple(choices), answer)
