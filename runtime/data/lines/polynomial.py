"""Samples, prints and parses lines of the polynomial-expansion task, such as `(7-3*z)*(-5*z-9)=15*z**2-8*z-63`.

A line consists of a product of two linear forms a*V + b and the expansion of this product. V is a variable, or the
sine, cosine or tangent of a variable. The lines have the distribution and the format of a data set by Scale AI. The
format is the output of sympy without spaces.

Line k of a stream depends only on word k (64 bits) of a SHAKE-256 output; see `draw`. A stream therefore has equal
lines on every machine, and any line can be computed without the previous lines.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specc.runtime.data.errors import DataError

Rows = npt.NDArray[np.uint8]  # [N, W], ASCII with zeros after the end of each row
Ints = npt.NDArray[np.int64]

VARIABLES = "achijknostxyz"
FUNCTIONS = ("", "sin", "cos", "tan")
LONGEST = 29  # the maximum number of characters of a side
SYMBOLS = "()*+-0123456789" + VARIABLES  # every character of a line except `=`
BLOCK = 1 << 16  # words per SHAKE-256 output

_LETTERS = np.array([VARIABLES.index(letter) for letter in "sincostanxyzhijk"])
_A = np.array([a for a in range(-9, 9) if a])
_B = np.array([b for b in range(-32, 32) if b])
_LARGEST_A, _LARGEST_B = 9, 32
_DRAWN_A, _DRAWN_B = ({*numbers.tolist()} for numbers in (_A, _B))
# The possible outer factors, by the number of binomials in the line.
_OUTERS = ({a * c for a in _DRAWN_A for c in _DRAWN_A}, _DRAWN_A, {1})


@dataclass(frozen=True, slots=True)
class Lines:
    """N lines, each stored in a canonical form as the coefficients of the product outer * forms[0] * forms[1].

    A form (a, b) is a*V + b. If b != 0, the form is a binomial. If b == 0, the form is a monomial; it is stored as V,
    with the coefficients (1, 0). A line with n binomials is printed as `outer * V ** (2 - n)` times the binomials, in
    their stored order.

    Attributes:
        variable: the variable of each line, as an index into VARIABLES, i64 [N].
        function: the function of each line, as an index into FUNCTIONS, i64 [N].
        outer: the constant factor of each line, i64 [N]; 1 if the line has two binomials.
        forms: a and b of each form, i64 [N, 2, 2].
    """

    variable: Ints
    function: Ints
    outer: Ints
    forms: Ints

    @classmethod
    def of(cls, variable: Ints, function: Ints, outer: Ints, forms: Ints) -> "Lines":
        """Returns lines in canonical form: moves the coefficients of monomials into `outer`, and sorts the binomials.

        Args:
            variable: the index of the variable of each line, i64 [N].
            function: the index of the function of each line, i64 [N].
            outer: the factor before each product, i64 [N].
            forms: the coefficients (a, b) of both factors a*V + b, i64 [N, 2, 2].

        Returns:
            N lines. Equal products give equal lines.
        """
        a, b = forms[..., 0], forms[..., 1]
        lone = b == 0
        outer = outer * np.where(lone, a, 1).prod(axis=1)
        forms = np.stack((np.where(lone, 1, a), b), axis=-1)
        # The order is: binomials that are printed with the constant first, other binomials, monomials.
        first = _constant_first(a, b)
        major, minor = np.where(first, b, a), np.where(first, a, b)
        rank = np.where(lone, 2, np.where(first, 0, 1)) * 1_000_000 + major * 1_000 + minor
        swap = rank[:, 1] < rank[:, 0]
        return cls(variable, function, outer, np.where(swap[:, None, None], forms[:, ::-1], forms))

    def __len__(self) -> int:
        return len(self.outer)

    def __getitem__(self, rows: slice | npt.NDArray[np.generic]) -> "Lines":
        return Lines(self.variable[rows], self.function[rows], self.outer[rows], self.forms[rows])

    @property
    def structures(self) -> Ints:
        """An integer for each line, i64 [N]. Two lines have the same integer if and only if their coefficients are
        equal, even if their variables or functions differ.
        """
        key = self.outer + 81
        for i in range(2):
            key = (key * 19 + self.forms[:, i, 0] + _LARGEST_A) * 65 + self.forms[:, i, 1] + _LARGEST_B
        return key

    @property
    def keys(self) -> Ints:
        """An integer for each line, i64 [N]. Two lines have the same integer if and only if their texts are equal."""
        return (self.structures * len(FUNCTIONS) + self.function) * len(VARIABLES) + self.variable

    def factors(self) -> Rows:
        return self._printed(_factors)

    def expansions(self) -> Rows:
        return self._printed(_expansions)

    def _printed(self, side: Callable[["Lines"], Rows]) -> Rows:
        return np.concatenate([side(self[start : start + BLOCK]) for start in range(0, max(len(self), 1), BLOCK)])

    def sides(self) -> tuple[Rows, Rows]:
        """Returns the left and the right sides of the lines as ASCII bytes, u8 [N, LONGEST] each, padded with zeros."""
        return self.factors(), self.expansions()

    @property
    def digest(self) -> str:
        digest = hashlib.sha256(b"polynomial")
        for column in (self.variable, self.function, self.outer, self.forms):
            digest.update(column.astype("<i8").tobytes())
        return digest.hexdigest()

    def texts(self) -> list[str]:
        equals, end = (np.full((len(self), 1), ord(mark), np.uint8) for mark in "=\n")
        table = np.hstack((self.factors(), equals, self.expansions(), end))
        text: bytes = table[table != 0].tobytes()
        return text.decode("ascii").splitlines()


def joined(parts: Sequence[Lines]) -> Lines:
    names = ("variable", "function", "outer", "forms")
    return Lines(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def draw(stream: str, seed: int, start: int, count: int) -> Lines:
    """Samples the lines with indices start .. start + count - 1 of a stream.

    Word k is the little-endian u64 at 8 * (k mod BLOCK) of SHAKE-256("specc polynomial {stream} {seed} {k // BLOCK}").
    Each word, modulo the product of the radices below, is a mixed-radix number. Its digits determine line k. The
    radices reproduce the distribution of 400,000 lines of the Scale AI data set. From the lowest digit on, the radices
    and the meanings of the digits are:

        16:      the letter, an index into "sincostanxyzhijk"; some letters occur more than once
        100:     0, 1, 2: V is the sin, cos or tan of the letter; other digits: V is the letter
        85, 315, 85, 315: a and b of the first form, a and b of the second form. a is 1 for the lowest fifth of the
            digits, otherwise uniform over -9 .. -1, 1 .. 8. b is 0 for the lowest fifth, otherwise uniform over
            -32 .. -1, 1 .. 31

    Args:
        stream: the name of the stream.
        seed: the seed of the stream, which selects its lines.
        start: the index of the first line.
        count: the number of lines.

    Returns:
        The `count` lines, in the order of the stream.
    """
    rest = _words(stream, seed, start, count) % np.uint64(16 * 100 * (85 * 315) ** 2)

    def digit(radix: int) -> Ints:
        nonlocal rest
        rest, value = np.divmod(rest, np.uint64(radix))
        return value.astype(np.int64)

    variable, chance = _LETTERS[digit(16)], digit(100)
    forms = []
    for _ in range(2):
        a, b = digit(85), digit(315)
        forms.append((np.where(a < 17, 1, _A[a % 17]), np.where(b < 63, 0, _B[b % 63])))
    function = np.where(chance < 3, chance + 1, 0)
    return Lines.of(variable, function, np.ones(count, np.int64), np.array(forms).transpose(2, 0, 1))


def _words(stream: str, seed: int, start: int, count: int) -> npt.NDArray[np.uint64]:
    parts = []
    for block in range(start // BLOCK, -(-(start + count) // BLOCK)):
        size = min(start + count - block * BLOCK, BLOCK)  # SHAKE-256 outputs are prefixes of longer outputs
        taken = hashlib.shake_256(f"specc polynomial {stream} {seed} {block}".encode()).digest(8 * size)
        parts.append(np.frombuffer(taken, "<u8")[max(start - block * BLOCK, 0) :])
    return np.concatenate([np.zeros(0, np.uint64), *parts])


# printing


class _Table:
    """A table of the decimal texts of the integers -1999 .. 1999, stored as columns of bytes."""

    def __init__(self, texts: Iterable[str]) -> None:
        array = np.array([text.encode("ascii") for text in texts])
        self._bytes = array.view(np.uint8).reshape(len(array), -1)

    def __call__(self, numbers: Ints, where: npt.NDArray[np.bool_] | None = None) -> Rows:
        rows = self._bytes[numbers + 1999]
        return rows if where is None else np.where(where[:, None], rows, 0).astype(np.uint8)


def _times(n: int) -> str:
    return f"{n}*" if abs(n) != 1 else "-" if n < 0 else ""


_NUMBERS = range(-1999, 2000)
_number = _Table(str(n) for n in _NUMBERS)  # 7
_signed = _Table(f"{n:+}" if n else "" for n in _NUMBERS)  # +7, nothing for 0
_coefficient = _Table(_times(n) if n else "" for n in _NUMBERS)  # 7 becomes `7*`, -1 becomes `-`, and 1 becomes nothing
_added = _Table(("+" if n > 0 else "") + _times(n) if n else "" for n in _NUMBERS)  # 7 is `+7*`, 1 is `+`, -1 is `-`
_NAMES = np.array([f"{name}({v})" if name else v for name in FUNCTIONS for v in VARIABLES], "S6")
_NAME_BYTES = _NAMES.view(np.uint8).reshape(len(_NAMES), -1)


def _constant_first(a: Ints, b: Ints) -> npt.NDArray[np.bool_]:
    return (a < 0) & (b > 0)


def _factors(lines: Lines) -> Rows:
    name = _NAME_BYTES[lines.function * len(VARIABLES) + lines.variable]
    first, second = lines.forms[:, 0], lines.forms[:, 1]
    some, two = first[:, 1] != 0, second[:, 1] != 0
    none, square = ~some, two & (first == second).all(axis=1)
    front = some & ~two & (lines.function == 0)  # 3*x*(x+7), but 3*(sin(x)+7)*sin(x)
    return _packed(
        _coefficient(lines.outer),
        _where(none | front, name),
        _word("**2", none),
        _word("*", front),
        _form(first, name, some),
        _word("**2", square),
        _word("*", two & ~square),
        _form(second, name, two & ~square),
        _word("*", some & ~two & ~front),
        _where(some & ~two & ~front, name),
    )


def _form(form: Ints, name: Rows, where: npt.NDArray[np.bool_]) -> Rows:
    a, b = form[:, 0], form[:, 1]
    first = _constant_first(a, b)
    columns = (_number(b, first), _coefficient(a), name, _signed(b, ~first))
    return _where(where, np.hstack((_word("(", where), *columns, _word(")", where))))


def _expansions(lines: Lines) -> Rows:
    name = _NAME_BYTES[lines.function * len(VARIABLES) + lines.variable]
    (a1, b1), (a2, b2) = (lines.forms[:, i].T for i in range(2))
    square, linear, constant = lines.outer * a1 * a2, lines.outer * (a1 * b2 + a2 * b1), lines.outer * b1 * b2
    first = (linear == 0) & (square < 0) & (constant > 0)  # 294-24*x**2
    leading = (_coefficient(square), name, _word("**2", np.ones(len(lines), np.bool_)))
    middle = (_added(linear), _where(linear != 0, name))
    return _packed(_number(constant, first), *leading, *middle, _signed(constant, ~first))


def _word(text: str, where: npt.NDArray[np.bool_]) -> Rows:
    return np.where(where[:, None], np.frombuffer(text.encode("ascii"), np.uint8), 0).astype(np.uint8)


def _where(where: npt.NDArray[np.bool_], rows: Rows) -> Rows:
    return np.where(where[:, None], rows, 0).astype(np.uint8)


def _packed(*columns: Rows) -> Rows:
    table = np.hstack(columns)
    filled = table != 0
    lengths = filled.sum(axis=1)
    if lengths.size and lengths.max() > LONGEST:
        raise ValueError(f"one side of a line has {lengths.max()} characters, but the task allows {LONGEST}")
    rows = np.zeros((len(table), LONGEST), np.uint8)
    rows[np.arange(LONGEST) < lengths[:, None]] = table[filled]
    return rows


# reading

_V = re.compile(rf"(?:(sin|cos|tan)\(([{VARIABLES}])\)|([{VARIABLES}]))")
_TIMES = r"(-?[0-9]+\*|-?)"
_FORM = re.compile(rf"\((?:{_TIMES}V([+-][0-9]+)|([0-9]+)(-[0-9]+\*|-)V)\)")
_PRODUCT = re.compile(rf"{_TIMES}(V\*\*2|V\*F|F\*V|F\*\*2|F\*F)")


def parse(factors: Iterable[str]) -> Lines:
    """Parses the left sides of lines, such as `4*(3*sin(k)-17)*sin(k)`.

    Raises DataError if a text is not a product of two linear forms, does not have the format of the task, or contains a
    number that `draw` never samples.
    """
    texts = list(factors)
    read = [_parsed(text) for text in texts]
    variable, function, outer = (np.array([line[i] for line in read], np.int64) for i in range(3))
    lines = Lines.of(variable, function, outer, np.array([line[3] for line in read], np.int64).reshape(-1, 2, 2))
    for text, row in zip(texts, lines.factors(), strict=True):
        if (printed := row[row != 0].tobytes().decode("ascii")) != text:
            raise DataError(f"{text!r} is not in the format of the task", f"write {printed}")
    return lines


def _parsed(text: str) -> tuple[int, int, int, list[tuple[int, int]]]:
    shown = repr(text) if len(text) <= 60 else f"{text[:60]!r}..."
    bad = DataError(f"{shown} is not a product of two linear forms", "e.g. (7-3*z)*(-5*z-9), 3*x*(x+7) or -9*s**2")
    if (variable := _V.search(text)) is None or "V" in text or len(text) > LONGEST:
        raise bad
    plain = text.replace(variable[0], "V")
    product = _PRODUCT.fullmatch(_FORM.sub("F", plain))
    if product is None:
        raise bad
    forms = []
    for times, constant, leading, last in _FORM.findall(plain):
        forms.append((_factor(times if constant else last), int(constant or leading)))
    forms = forms * 2 if product[2] == "F**2" else forms
    outer = _factor(product[1])
    if not all(a in _DRAWN_A and b in _DRAWN_B for a, b in forms) or outer not in _OUTERS[len(forms)]:
        raise bad
    forms += [(1, 0)] * (2 - len(forms))
    return VARIABLES.index(variable[2] or variable[3]), FUNCTIONS.index(variable[1] or ""), outer, forms


def _factor(text: str) -> int:
    return int(text[:-1]) if text.endswith("*") else -1 if text else 1
