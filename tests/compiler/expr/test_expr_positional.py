"""A function of positions is one entry: what an entry states is all that masks, scores and printers read of it."""

import pytest
import torch

from specc.compiler.expr import ExprError, cuda_text, torch_text, torch_value, triton_text
from specc.compiler.expr.interval import bounds, python_function
from specc.compiler.expr.mask import Mask, bound_mask, parse_mask, window_of
from specc.compiler.expr.positional import POSITIONAL, HeadFunction, Refusal, WholeFunction
from specc.compiler.expr.score import Score, bound_score
from specc.compiler.expr.spell import cute_text
from specc.compiler.expr.values import Binary, Call, Const, Expr, Printer
from specc.compiler.ops.saved_attention import ScoredAttention

HEADS, TOKENS = 4, 12


def _refused(args: tuple[Expr, ...]) -> Refusal | None:
    return None if args[1] != Const(0) else (1, "gap has no step of 0", "write gap(i - j, 4)")


def _gap_text(printer: Printer, language: str, d: Expr, step: Const) -> str:
    return f"({printer.text(Binary('//', d, step))})"


GAP = WholeFunction(
    "gap(i - j, 4)",
    check=_refused,
    value=lambda d, step: int(d // step),
    bounds=lambda low, high, step: (Call("gap", (low, step)), Call("gap", (high, step))),
    torch=lambda d, step: d // step,
    text=_gap_text,
)
SHARE = HeadFunction("share(h)", expand=lambda h, heads: (h + 1) / Const(heads))


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (GAP, SHARE):
        monkeypatch.setitem(POSITIONAL, function.name, function)


@pytest.mark.usefixtures("functions")
def test_a_new_whole_function_serves_masks() -> None:
    text = bound_mask("j <= i and gap(i - j, 4) < 2", HEADS, 64)
    assert text == "j <= i and gap(i - j, 4) < 2"
    assert window_of(text, HEADS, 64) == (0, 8)  # the search over boxes reads the bounds
    mask, plain = Mask.of(text, HEADS), Mask.of("j <= i and (i - j) // 4 < 2", HEADS)
    assert mask.pairs(TOKENS) == plain.pairs(TOKENS)
    tile = ("i0", "i1", "j0", "j1")
    some, want = (python_function(part.any, tile) for part in (mask, plain))
    tiles = [(i, i + 3, j, j + 3) for i in range(0, 32, 4) for j in range(0, 32, 4)]
    assert [some(*bounds) for bounds in tiles] == [want(*bounds) for bounds in tiles]
    i, j = (t for t in torch.meshgrid(torch.arange(TOKENS), torch.arange(TOKENS), indexing="ij"))
    assert torch.equal(torch_value(mask.condition, {"i": i, "j": j}), torch_value(plain.condition, {"i": i, "j": j}))
    with pytest.raises(ExprError, match="the mask is not causal"):
        bound_mask("gap(i - j, 4) >= 0 or gap(i - j, 4) == -1", HEADS, 64)


@pytest.mark.usefixtures("functions")
def test_a_new_function_prints_in_each_language() -> None:
    gap = parse_mask("gap(i - j, 4) < 2").a  # type: ignore[attr-defined]
    for text in (torch_text(gap, whole=True), triton_text(1.0 * gap), cute_text(gap, whole=True)):
        assert "(i - j) // 4" in text
    with pytest.raises(ExprError, match="positions of tokens are not part of this language"):
        cuda_text(gap)
    low, high = (python_function(bound, ("d0", "d1")) for bound in bounds(gap))
    assert [(low(a, b), high(a, b)) for a, b in ((0, 7), (5, 9))] == [(0, 1), (1, 2)]


@pytest.mark.usefixtures("functions")
def test_new_functions_serve_scores() -> None:
    tables = (("bias", (3,)),)
    text = bound_score("s * share(h) + bias[gap(i - j, 4)] + sqrt(gap(i, 2))", tables, "j <= i", HEADS, TOKENS)
    op = ScoredAttention(text, tables=("bias",))
    same = ScoredAttention("s * (h + 1) / 4 + bias[(i - j) // 4] + sqrt(i // 2)", tables=("bias",))
    generator = torch.Generator().manual_seed(1)
    shapes = ((1, TOKENS, HEADS, 8),) * 3 + ((3,),)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    for result, want in zip(op.reference(*inputs), same.reference(*inputs), strict=True):
        torch.testing.assert_close(result, want, rtol=1e-12, atol=1e-12)
    with pytest.raises(ExprError, match=r"the index .* in dim 0 of bias.* out of range: it is 3 at i = 12, j = 0"):
        bound_score("s + bias[gap(i - j, 4)]", tables, "j <= i", HEADS, TOKENS + 1)


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gap(i - j) < 2", "gap takes 2 arguments, not 1; write gap"),
        ("gap(i / 2, 4) < 2", "i / 2 is not a whole number; write gap"),
        ("gap(i, j) < 2", "the arguments of gap after the first must be constants; write gap"),
        ("gap(i, 0) < 2", "gap has no step of 0; write gap"),
        ("share(h) < 2", "is not a whole number; use whole numbers"),
    ],
)
def test_wrong_calls_are_refused(text: str, message: str) -> None:
    with pytest.raises(ExprError, match=message):
        parse_mask(text)


def test_a_slope_of_a_known_head_is_its_number() -> None:
    """The formula replaces it before constants are evaluated; without it, the score would contain the head itself."""
    text = bound_score("s - slope(heads - 1) * (i - j)", (), "j <= i", HEADS, 64)
    assert text == bound_score("s - 2 ** -8 * (i - j)", (), "j <= i", HEADS, 64)
    assert Score.of(text, (), HEADS).slope == Const(1)


def test_signs_of_functions_of_positions_are_known() -> None:
    text = bound_score("s + sqrt(bucket(i - j, 8, 16)) + sqrt(slope(h))", (), "j <= i", HEADS, 64)
    numbers = {"i": torch.tensor(5), "j": torch.tensor(2), "h": torch.tensor(1)}
    values = {"s": torch.zeros((), dtype=torch.float64), **numbers}
    result = torch_value(Score.of(text, (), HEADS).value, values)
    torch.testing.assert_close(result, torch.tensor(3.0, dtype=torch.float64).sqrt() + 2.0**-2)
