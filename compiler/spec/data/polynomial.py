"""Generated pairs of lines: products of two linear forms, and their expansions."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from specc.compiler.architectures.architecture import Form
from specc.compiler.spec.data.kind import DataKind
from specc.compiler.strict import NonNegative, Problem

SYMBOLS = "()*+-0123456789achijknostxyz"  # every character of a line, except the `=` between its sides
TOKENS = 30  # tokens of the longest side of a line, with its stop token


class PolynomialData(DataKind):
    """Products such as `(7-3*z)*(-5*z-9)` and their expansions.

    Attributes:
        lines: the number of training lines. Each epoch reads these lines in a new order.
        seed: the seed with which the lines are drawn.
        fresh: whether new lines are generated after the first `lines` lines, so no training line is repeated. New lines
            are never in a held-out split.
    """

    gives: ClassVar[Form] = "lines"
    usual: ClassVar[str] = "polynomial"
    generated: ClassVar[bool] = True

    kind: Literal["polynomial"]
    lines: Annotated[int, Field(ge=1, le=5_000_000)] = 800_000
    seed: NonNegative = 42
    fresh: bool = False

    def problems_with_reader(self, model: Any) -> Iterator[Problem]:
        if missing := [char for char in SYMBOLS if char not in model.characters]:
            message = f"the vocabulary lacks {', '.join(map(repr, missing))}, which the lines contain"
            yield Problem(("model", "vocab", "chars"), "S219", message, f'use "{SYMBOLS}"')
        if model.window < TOKENS:
            message = f"a line has up to {TOKENS} tokens with its stop token, but `context` is {model.window}"
            yield Problem(("model", "context"), "S223", message, f"use at least {TOKENS}")
