"""The base class of tasks, the reader of task files, and the results of tasks."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from specc.compiler.catalog import classes
from specc.runtime.data.documents.files import READ_ERRORS, open_file
from specc.runtime.data.documents.formats import KINDS, kind_of, read_documents
from specc.runtime.data.documents.jsonl import json_records
from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.eval import tasks
from specc.runtime.eval.tasks.rows import Encoder, Row, RowScore
from specc.runtime.metrics.expert_load import imbalance

HINT = (
    'each line is one JSON object: {"context": ..., "choices": [...], "answer": 0}, {"context": ..., "target": ...} or '
    '{"text": ...}'
)


@dataclass(frozen=True, slots=True)
class Measure:
    """The value of a measure and its standard error. The error is None if there are fewer than two examples."""

    value: float
    error: float | None

    def __str__(self) -> str:
        return f"{self.value:.4f}" + ("" if self.error is None else f" +- {self.error:.4f}")


def mean(values: Sequence[float]) -> Measure:
    """Returns the mean of the values and its standard error."""
    count = len(values)
    return Measure(float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else None)


def ratio(values: Sequence[float], units: Sequence[float]) -> Measure:
    """Returns sum(values) / sum(units), and its standard error to first order."""
    total, count = sum(units), len(values)
    quotient = sum(values) / total
    left = [value - quotient * unit for value, unit in zip(values, units, strict=True)]
    error = math.sqrt(count / (count - 1) * math.fsum(x * x for x in left)) / total if count > 1 else None
    return Measure(quotient, error)


def exponential(measure: Measure) -> Measure:
    """Returns the exponential of a measure, and the standard error of the exponential to first order."""
    value = math.exp(min(measure.value, 700.0))
    return Measure(value, None if measure.error is None else value * measure.error)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The result of a task.

    Attributes:
        task: the kind of the task.
        file: the name of the file of examples.
        digest: the SHA-256 (hex) of the file.
        examples: the number of examples in the file.
        tokens: the number of scored tokens.
        size: the bytes of text that the scored tokens represent.
        truncated: the number of rows that were cut to the context of the model.
        measures: the measures by name.
        loads: the fraction of tokens that each expert receives, by layer; empty if the model has no experts.
    """

    task: str
    file: str
    digest: str
    examples: int
    tokens: int
    size: int
    truncated: int
    measures: Mapping[str, Measure]
    loads: Mapping[str, Sequence[float]]

    def report(self) -> list[str]:
        numbers = ", ".join(f"{name} {measure}" for name, measure in self.measures.items())
        counts = f"{self.examples:,} examples, {self.tokens:,} scored tokens of {self.size:,} bytes"
        cut = f", {self.truncated:,} contexts cut on the left" if self.truncated else ""
        experts = [f"experts: the largest load is {imbalance(self.loads):.2f} times the mean"] if self.loads else []
        return [f"{self.file} ({self.task}): {numbers}", f"{counts}{cut}", *experts]

    def facts(self) -> dict[str, Any]:
        measures = {name: {"value": m.value, "standard_error": m.error} for name, m in self.measures.items()}
        counts = {"examples": self.examples, "tokens": self.tokens, "bytes": self.size, "truncated": self.truncated}
        experts = {"experts": self.loads} if self.loads else {}
        return {"task": self.task, "file": self.file, "sha256": self.digest, **counts, "measures": measures, **experts}


@dataclass(frozen=True, slots=True)
class TaskResults:
    """The results of several task files, in order."""

    results: tuple[TaskResult, ...]

    def report(self) -> list[str]:
        return [line for result in self.results for line in result.report()]

    def facts(self) -> dict[str, Any]:
        return {"tasks": [result.facts() for result in self.results]}


class Task(ABC):
    """The examples of a task file, which are all of one kind. Each kind is a subclass in a separate module of this
    package.

    Args:
        records: a pair for each line of the file: the place of the line for messages, and its JSON object.

    Attributes:
        name: the name of the kind.
        key: a key that only the JSON objects of this kind have.
        greedy: whether the measures of the kind need `RowScore.greedy`.

    Raises:
        DataError: a JSON object is not an example of this kind.
    """

    name: ClassVar[str]
    key: ClassVar[str]
    greedy: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, records: Iterable[tuple[str, Mapping[str, Any]]]) -> None: ...

    @abstractmethod
    def rows(self, encoder: Encoder) -> list[list[Row]]:
        """Returns the rows to score for each example. Raises DataError if an example cannot be scored; the message
        names the line.
        """

    @abstractmethod
    def measures(self, rows: Sequence[Sequence[Row]], scores: Sequence[Sequence[RowScore]]) -> Mapping[str, Measure]:
        """Computes the measures of the task, by name. For each example, `rows` has its rows, and `scores` has one score
        per row.
        """


def read_task(path: Path) -> Task:
    """Reads the examples of a file.

    In a .jsonl file, the keys of the lines determine the kind of task, and all lines must be of one kind. In any other
    text file, each document is an example of the task `text`.

    Raises DataError if the file or an example cannot be read; the message names the line. Raises DataIntegrityError if
    a compressed file is damaged.
    """
    kind = kind_of(path)
    if not path.is_file():
        raise DataError(f"--task {path}: {'not a file' if path.exists() else 'no such file'}", HINT)
    if not kind:
        raise DataError(f"--task {path}: cannot read examples from this file", f"readable: {', '.join(KINDS)}")
    known = {each.key: each for each in classes(tasks, Task).values()}
    try:
        if kind != ".jsonl":
            texts = (document.decode() for document in read_documents(path) if document)
            records: list[tuple[str, Mapping[str, Any]]] = [(str(path), {"text": text}) for text in texts]
        else:
            with open_file(path) as file:
                records = list(json_records(file, path, HINT))
    except READ_ERRORS as error:
        raise DataIntegrityError(f"{path}: damaged compressed file: {error}", "copy the file again") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8 at byte {error.start} of a document", "convert the file") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    if not records:
        raise DataError(f"--task {path}: the file has no examples", HINT)
    key = ""
    for where, record in records:
        keys = [each for each in known if each in record]
        if len(keys) != 1:
            message = f"{where}: the line has {' and '.join(keys) or 'none'} of the keys {', '.join(known)}"
            raise DataError(message, HINT)
        if key and keys[0] != key:
            message = f"{where}: the line has the key {keys[0]}, but the lines before it have {key}"
            raise DataError(message, "put examples of different kinds into different files")
        key = keys[0]
    task: Task = known[key](records)
    return task


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_of(record: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    """Returns a string of a record.

    Args:
        record: the JSON object of a line.
        key: the key of the string.
        where: the file and line, with which error messages begin.
        default: the string to return if the record does not have the key. None makes the key required.

    Returns:
        The string.

    Raises:
        DataError: the value is not a string, or the key is missing and `default` is None.
    """
    value = record.get(key, default)
    if not isinstance(value, str):
        what = f'"{key}" of type {type(value).__name__}' if key in record else f'no "{key}"'
        raise DataError(f'{where}: expected a string "{key}", but the line has {what}', HINT)
    return value
