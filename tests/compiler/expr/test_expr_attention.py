"""Scores and masks: values, derivatives, proofs of causality, and interval analysis against all pairs."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specc.compiler.expr import ExprError, torch_text, torch_value
from specc.compiler.expr.interval import (
    BOX,
    Undecided,
    bounds,
    example,
    largest_distance,
    over_tile,
    python_function,
    truth,
)
from specc.compiler.expr.mask import LANGUAGE, Mask, bound_mask, parse_mask, sees_itself, window_of
from specc.compiler.expr.parse import parse
from specc.compiler.expr.positional import bucket_bounds, slope
from specc.compiler.expr.score import PLAIN, Score, bound_score, parse_score
from specc.compiler.expr.values import Const, Expr, Read, Var
from specc.compiler.kernels.attention.score_lines import by_distance

NAMES = ("i", "j", "h")
NUMBERS = {"heads": 4, "context": 64}
TABLES = {"bias": (4, 64), "near": (8,)}
BUCKETS = ((32, 128), (32, 64), (8, 16), (2, 5), (16, 1000), (64, 4096))
REFUSED = {
    "j <= i + 1": (0, 1),
    "j // 64 <= i // 64": (0, 1),
    "i - j < 512": (0, 1),
    "j < 4": (0, 1),
    "abs(i - j) < 5": (0, 1),
    "j <= i or j < 16": (0, 1),
    "i % 8 <= j % 8": (0, 1),
    "document(i) == document(j)": (0, 1),
    "j <= i or document(i) != document(j)": (0, 1),
    "j <= i or i >= 1000 and j <= i + 5": (1000, 1001),
    "j <= i or i == 900 and j == 999": (900, 999),
    "(i - j) // 4 >= -1 and i // 64 == j // 64": (0, 1),
}
PROVED = (
    "j <= i",
    "j // 64 < i // 64 or j // 64 == i // 64 and j <= i",
    "j <= i and (i - j) % 4 == 0",
    "j <= i and (i - j < 512 or j < 4)",
    "j <= i and document(i) == document(j)",
    "not j > i",
    "0 <= i - j < 100",
    "max(i, j) == i",
    "min(i, j) == j",
    "abs(i - j) == i - j",
    "2 * j <= i + j",
    "i % 8 >= j % 8 and i // 8 == j // 8",
    "j * j <= i * i",
    "j <= i - h",
    "j + h <= i or j <= i and h < 2",
    "(i - j) // 4 >= 0",
    "i // 64 > j // 64",
    "j <= i and document(i) == document(j) or j < 4 and j <= i",
)
PLAIN_MASKS = (
    "i >= j",
    "j < i + 1",
    "not j > i",
    "0 <= i - j",
    "i - j >= 0 and (j >= 0 or i == j)",
    "j <= i and i < 2000000",
)


def holds(text: str, i: int, j: int, h: int = 0, same: bool = True) -> bool:
    """A mask by Python."""
    text = text.replace("document(i) == document(j)", str(same)).replace("document(i) != document(j)", str(not same))
    return bool(eval(text, {"i": i, "j": j, "h": h, "abs": abs, "min": min, "max": max, **NUMBERS}))


@pytest.mark.parametrize("text", REFUSED)
def test_masks_that_let_a_later_key_through_are_refused_with_a_pair(text: str) -> None:
    i, j = REFUSED[text]
    with pytest.raises(ExprError, match=f"the query at i = {i} attends to the key at j = {j}"):
        bound_mask(text, 4, 2048)
    assert j > i and any(holds(text, i, j, same=same) for same in (True, False))


@pytest.mark.parametrize("text", PROVED)
def test_causal_masks_are_proved(text: str) -> None:
    bound_mask(text, 4, 64)
    for i, j, h, same in itertools.product(range(40), range(40), range(4), (True, False)):
        assert j <= i or not holds(text, i, j, h, same)


@pytest.mark.parametrize("text", PLAIN_MASKS)
def test_masks_of_all_earlier_keys_are_the_causal_mask(text: str) -> None:
    assert bound_mask(text, 4, 2048) == "j <= i"
    assert bound_mask("j < i", 4, 2048) != "j <= i"
    sizes = (("dim", 64), ("kv_heads", 2), ("head_dim", 16), ("values", 32))
    assert bound_mask("j <= i and i - j < head_dim", 4, 2048, 0, sizes) == bound_mask("j <= i and i - j < 16", 4, 2048)
    assert bound_score("s / sqrt(dim) + kv_heads * h", (), "j <= i", 4, 64, 0, sizes) == bound_score(
        "s / 8 + 2 * h", (), "j <= i", 4, 64
    )


def test_an_index_is_within_its_table_in_the_same_document_and_in_others() -> None:
    mask = bound_mask("j <= i and (i - j < 8 or document(i) != document(j))", 2, 64)
    with pytest.raises(ExprError, match="out of range: it is 8 at i = 8, j = 0"):
        bound_score("s + bias[i - j]", (("bias", (8,)),), mask, 2, 64)


@pytest.mark.parametrize(
    ("score", "mask", "bound"),
    [
        ("s - log(i - j + 1)", "j <= i", "s - log(max(i - j + 1, 1))"),
        ("s / (i - j)", "j < i", "s / max(i - j, 1)"),
        ("s + bias[h] * log(16 - (i - j))", "j <= i and i - j < 16", "s + bias[h] * log(max(16 + j - i, 1))"),
        ("s + log(1 + bias[h] * (i - j))", "j <= i", "s + log(1 + bias[h] * max(i - j, 0))"),
        ("where(i - j < 5, s, s * log(i - j - 4))", "j <= i", "where(i - j < 5, s, s * log(max(i - j - 4, 1)))"),
        ("s * exp(-0.1 * (i - j))", "j <= i", "s * exp(-0.1 * max(i - j, 0))"),
        ("s / sqrt(i + 1)", "j <= i", "s / sqrt(i + 1)"),
        ("s * exp(-abs(i - j))", "j <= i", "s * exp(-abs(i - j))"),
    ],
)
def test_scores_of_hidden_pairs_are_finite(score: str, mask: str, bound: str) -> None:
    """The gradient of a hidden pair is 0 times the derivative of its score, which must not be NaN."""
    text = bound_score(score, (("bias", (2,)),) if "bias" in score else (), mask, 2, 64)
    assert text == bound
    assert bound_score(text, (("bias", (2,)),) if "bias" in score else (), mask, 2, 64) == text


@pytest.mark.parametrize(
    ("score", "mask", "message"),
    [
        ("s + log(i - j)", "j <= i", "`log(i - j)` has no value at i = 0, j = 0"),
        ("s + 1 / (i - j)", "j <= i", "`1 / (i - j)` has no value at i = 0, j = 0"),
        ("s + sqrt(j - 3)", "j <= i and j > 1", "`sqrt(j - 3)` has no value at i = 2, j = 2"),
    ],
)
def test_scores_that_are_undefined_for_a_visible_pair_are_refused(score: str, mask: str, message: str) -> None:
    with pytest.raises(ExprError) as caught:
        bound_score(score, (), mask, 2, 64)
    assert message in caught.value.message and "max(" in (caught.value.hint or "")


def test_elements_with_constant_indices_are_not_numbers() -> None:
    text = "s + tanh(bias[0] / 3) + where(bias[1] > 0, bias[0], 1)"
    assert bound_score(text, (("bias", (2,)),), "j <= i", 2, 64) == text


def test_a_search_without_a_result_says_so() -> None:
    with pytest.raises(Undecided, match="needs more than 50 boxes"):
        example(parse_mask("i * i * i == j * j * j + 7 and j > i"), 1 << 20, work=50)


@pytest.mark.parametrize("text", [*PROVED, "j < i", "j <= i and i - j < 7 and (j % 2 == 0 or h == 1)"])
def test_counts_windows_and_own_keys_are_those_of_all_pairs(text: str) -> None:
    tokens = 64
    text = bound_mask(text, 4, tokens)
    pairs = [p for p in itertools.product(range(tokens), range(tokens), range(4)) if holds(text, *p)]
    heads = 4 if "h" in text else 1
    assert Mask.of(text, 4).pairs(tokens) == round(sum(h < heads for _, _, h in pairs) / heads)
    width = window_of(text, 4, tokens)
    if width is not None:
        first, window = width
        assert max((i - j for i, j, _ in pairs if j >= first), default=0) == window - 1
    diagonal = all(holds(text, i, i, h) for i in range(tokens) for h in range(4))
    assert diagonal or not sees_itself(text)


def test_windows() -> None:
    assert window_of("j <= i and i - j < 512", 4, 32768) == (0, 512)
    assert window_of("j <= i and (i - j < 512 or j < 4)", 4, 32768) == (4, 512)
    assert window_of("j <= i and i // 64 == j // 64", 4, 32768) == (0, 64)
    assert window_of("j <= i and i - j < 512", 4, 512) is None
    assert window_of("j <= i and (i - j) % 4 == 0", 4, 4096) is None
    assert window_of("j <= i and document(i) == document(j)", 4, 4096) is None
    assert window_of("j <= i and document(i) != document(j)", 4, 4096) is None
    assert window_of("j <= i and (i - j < 8 or not document(i) == document(j))", 4, 4096) is None
    assert window_of("j <= i and i - j < 8 and not document(i) == document(j)", 4, 4096) == (0, 8)
    assert largest_distance(parse_mask("i < j"), 100) == -1
    assert largest_distance(parse_mask("i < j and j < i"), 100) is None


WHOLE = st.deferred(
    lambda: (
        st.sampled_from(["i", "j", "h"])
        | st.integers(0, 9).map(str)
        | st.tuples(WHOLE, st.sampled_from("+-*"), WHOLE).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
        | st.tuples(WHOLE, st.sampled_from(["//", "%"]), st.integers(1, 7)).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
        | st.tuples(st.sampled_from(["min", "max"]), WHOLE, WHOLE).map(lambda t: f"{t[0]}({t[1]}, {t[2]})")
        | WHOLE.map(lambda t: f"abs({t})")
        | st.tuples(WHOLE, st.sampled_from(BUCKETS)).map(lambda t: f"bucket({t[0]}, {t[1][0]}, {t[1][1]})")
    )
)
COMPARED = st.tuples(WHOLE, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), WHOLE).map(" ".join)
CONDITION = st.deferred(
    lambda: (
        COMPARED
        | st.tuples(CONDITION, st.sampled_from([" and ", " or "]), CONDITION).map(lambda t: f"({t[0]}{t[1]}{t[2]})")
        | CONDITION.map(lambda t: f"not ({t})")
    )
)
SPAN = st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda t: (t[0], t[0] + t[1]))


def parsed(text: str) -> Expr | None:
    """The tree of a random text; None if it is too long or divides by zero."""
    try:
        return parse(text, NAMES, LANGUAGE)
    except ExprError:
        return None


@settings(max_examples=100, deadline=None)
@given(CONDITION, SPAN, SPAN, st.integers(0, 3))
def test_truth_over_a_box_is_never_wrong(text: str, rows: tuple[int, int], columns: tuple[int, int], last: int) -> None:
    condition = parsed(text)
    if condition is None:
        return
    (i0, i1), (j0, j1) = rows, columns
    box = (i0, i1, j0, j1, i0 - j1, i1 - j0, 0, last)
    try:
        some, every = (python_function(part, BOX)(*box) for part in truth(condition))
    except ExprError:  # its bounds have too many parts
        return
    function = python_function(condition, NAMES)
    values = {bool(function(*p)) for p in itertools.product(range(i0, i1 + 1), range(j0, j1 + 1), range(last + 1))}
    assert some or True not in values
    assert not every or False not in values
    try:
        tile = (python_function(over_tile(part), (*BOX[:4], "h0", "h1")) for part in truth(condition))
        assert [bool(f(i0, i1, j0, j1, 0, last)) for f in tile] == [bool(some), bool(every)]
    except ExprError:
        return


@settings(max_examples=60, deadline=None)
@given(CONDITION)
def test_an_example_holds_and_its_absence_is_right(text: str) -> None:
    condition = parsed(text)
    if condition is None:
        return
    function = python_function(condition, NAMES)
    exists = any(function(*p) for p in itertools.product(range(9), range(9), range(2)))
    try:
        pair = example(condition, 9, 2)
    except ExprError:
        return
    assert (pair is not None) == exists
    assert pair is None or function(*pair)


@pytest.mark.parametrize(
    "text", ["i - j", "i // 8 - j // 8", "j % 4 + h", "min(i - j, 7)", "bucket(i - j, 32, 128)", "i * j"]
)
def test_bounds_are_reached(text: str) -> None:
    expr = parse(f"{text} < 0", NAMES, LANGUAGE).a  # type: ignore[attr-defined]
    low, high = (python_function(over_tile(part), (*BOX[:4], "h0", "h1")) for part in bounds(expr))
    value = python_function(expr, NAMES)
    for tile in ((0, 7, 0, 7, 0, 3), (16, 31, 8, 15, 0, 0), (40, 40, 3, 3, 2, 2)):
        i0, i1, j0, j1, h0, h1 = tile
        values = [value(*p) for p in itertools.product(range(i0, i1 + 1), range(j0, j1 + 1), range(h0, h1 + 1))]
        assert (low(*tile), high(*tile)) == (min(values), max(values))


def test_what_depends_on_the_distance() -> None:
    distance = by_distance(parse("bucket(i - j, 32, 128) + h < 0", NAMES, LANGUAGE).a)  # type: ignore[attr-defined]
    assert str(distance) == "bucket(d, 32, 128) + h"
    assert by_distance(Var("i") + Var("j")) is None


@pytest.mark.parametrize(
    "text", ["j <= i and (i - j) % 3 == 1", "not (j > i) and h // 2 == 1", "abs(j - i) // 4 <= min(i, 3)"]
)
def test_torch_text_of_a_mask_is_python(text: str) -> None:
    i, j, h = torch.arange(20)[:, None], torch.arange(20), torch.arange(4)[:, None, None]
    condition = parse_mask(text)
    result = eval(torch_text(condition, whole=True), {"torch": torch, "i": i, "j": j, "h": h})
    want = torch.tensor([[[holds(text, a, b, c) for b in range(20)] for a in range(20)] for c in range(4)])
    assert torch.equal(result.expand(want.shape), want)
    assert torch.equal(torch_value(condition, {"i": i, "j": j, "h": h}).expand(want.shape), want)


# --- scores ---


@pytest.mark.parametrize(("count", "distance"), BUCKETS)
def test_buckets_are_those_of_t5(count: int, distance: int) -> None:
    exact = count // 2
    d = torch.arange(-3, 3 * distance)
    text = f"bucket(i - j, {count}, {distance}) < 0"
    expr = parse(text, NAMES, LANGUAGE).a  # type: ignore[attr-defined]
    result = eval(torch_text(expr, whole=True), {"torch": torch, "i": d, "j": torch.tensor(0)}).clamp(min=0)
    far = exact + (d.clamp(min=1).double() / exact).log() / math.log(distance / exact) * (count - exact)
    want = torch.where(d < exact, d.clamp(min=0), (far + 1e-9).long().clamp(max=count - 1))
    assert torch.equal(result, want)
    assert torch.equal(torch_value(expr, {"i": d, "j": torch.tensor(0)}), want)
    assert list(bucket_bounds(count, distance)) == sorted(bucket_bounds(count, distance))


def test_slopes_are_those_published() -> None:
    def of(heads: int) -> list[float]:
        h = torch.arange(heads, dtype=torch.float64)
        return torch_value(slope(Var("h"), heads), {"h": h}).tolist()

    assert of(8) == [2.0**-n for n in range(1, 9)]
    assert of(16) == pytest.approx([2 ** (-n / 2) for n in range(1, 17)])
    assert of(12) == pytest.approx([2.0**-n for n in range(1, 9)] + [2 ** (-n / 2) for n in (1, 3, 5, 7)])
    assert of(1) == [2.0**-8]


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("s + 0 * i", PLAIN),
        ("s * 1 - (i - j) * 0", PLAIN),
        ("2 * s / 2", PLAIN),
        ("s + (slope(h) - slope(h)) * i", PLAIN),
        ("s - slope(h) * (i - j)", "s - slope(h) * (i - j)"),
        ("heads * s", "4 * s"),
    ],
)
def test_normal_forms(text: str, normal: str) -> None:
    assert bound_score(text, (), "j <= i", 4, 64) == normal


SCORES = (
    "s - slope(h) * (i - j)",
    "30 * tanh(s / 30)",
    "s * bias[h, i - j] + near[min(i, 7)]",
    "exp(0.1 * s) * near[(i - j) % 8] + s * near[0]",
    "where(i - j > 4, s, 2 * s + bias[h, j])",
    "s + bias[h, bucket(i - j, 32, 64)] ** 2",
)


@pytest.mark.parametrize("text", SCORES)
def test_derivatives_are_those_of_autograd(text: str) -> None:
    generator = torch.Generator().manual_seed(len(text))
    bound = bound_score(text, tuple(TABLES.items()), "j <= i", 4, 64)
    score = Score.of(bound, tuple(TABLES), 4)
    i, j, h = torch.arange(9.0).double()[:, None], torch.arange(9.0).double(), torch.arange(4.0).double()[:, None, None]
    s = torch.randn(4, 9, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    tables: dict[str, Tensor] = {
        name: torch.rand(shape, generator=generator, dtype=torch.float64) for name, shape in TABLES.items()
    }
    values: dict[str, Tensor | float] = {"s": s, "i": i, "j": j, "h": h, **tables}
    reads = {
        read.variable: torch_value(Read(read.table, read.indices), values).expand(s.shape).clone().requires_grad_()
        for read in score.reads
    }
    values |= reads
    value = torch_value(score.value, values).expand(s.shape)
    wanted = torch.autograd.grad(value.sum(), [s, *reads.values()])
    for slope_of, want in zip((score.slope, *score.slopes), wanted, strict=True):
        torch.testing.assert_close(torch_value(slope_of, values).expand(s.shape), want, rtol=1e-12, atol=1e-12)
    names = {"torch": torch, "s": s, "i": i.long(), "j": j.long(), "h": h.long(), **tables}
    torch.testing.assert_close(eval(torch_text(score.value, score.elements()), names), value, rtol=1e-6, atol=1e-6)
    assert str(parse_score(bound, {name: len(table.shape) for name, table in tables.items()})) == bound


def test_indices_need_to_be_in_range_only_where_the_mask_holds() -> None:
    tables = (("bias", (4, 16)),)
    with pytest.raises(ExprError, match="which has size 16, may be out of range: it is 16 at i = 16, j = 0"):
        bound_score("s + bias[h, i - j]", tables, "j <= i", 4, 64)
    for mask in ("j <= i and i - j < 16", "j <= i and i // 16 == j // 16"):
        assert bound_score("s + bias[h, i - j]", tables, mask, 4, 64) == "s + bias[h, i - j]"
    with pytest.raises(ExprError, match="out of range: it is 4 at h = 4"):
        bound_score("s + bias[h, 0]", tables, "j <= i", 5, 64)


def test_random_masks_are_parsed_as_python() -> None:
    """Canonical text means what the text means."""
    rng = random.Random(5)
    words = ("j <= i", "i - j < 5", "j < 4", "i // 4 == j // 4", "(i - j) % 2 == 0", "h == 1", "0 <= i - j < 9")
    for _ in range(60):
        text = " ".join(rng.choice(("", "not ")) + rng.choice(words) + rng.choice((" and", " or")) for _ in range(4))
        text = f"{text} {rng.choice(words)}"
        condition = parse_mask(text)
        assert parse_mask(str(condition)) == condition
        function = python_function(condition, NAMES)
        for i, j in itertools.product(range(0, 12, 3), range(12)):
            assert bool(function(i, j, 1)) == holds(text, i, j, 1)


def test_constants_of_a_score_are_numbers() -> None:
    assert Score.of("s", (), 4).slope == Const(1) and Score.of("s", (), 4).plain
