"""Long lines of generated Python are broken where a formatter would."""

import ast

import pytest

from specc.compiler.expr.python_lines import fitted

LONG = [
    "x = first(aaaaaaaaaa, bbbbbbbbbb(1, 2), cccccccccc[0]).then(0, x.shape[:-1])",
    "x, y = first(aaaaaaaaaa, bbbbbbbbbb(1, 2), cccccccccc[0], dddddddddddddddddddd)",
    "return aaaaaaaaaa @ b, (cccccccccc * ddddddddd).sum(8), eeeeeeeeeee.T @ fffffffff",
    "return *((aaaaaaaaaaaaa,) if bbbbbbbbbbbbb else ()), cccccccccccc(d), eeeeeeeeee",
    "return aaaaaaaaaaaaaaaaaaaaa + bbbbbbbbbbb * ccccccccccccc(d)",
    "return Fused.apply(xxxxxxxxxx.flatten(0, -2), up, down, residual).unflatten(0, x.shape[:-1])",
    "x = (aaaaaaaaaaaaaaaaaaaaaaaaa + bbbbbbbbbbbbbbbbb * (ccccccccccccccc * ddddd)).unflatten(-1, (H, C))",
    "y = f(aaaaaaaaaaaaaaa, b=bbbbbbbbbbbbbbbbbbbbb + cccccccccccccccccc * ddddddddddddddddd.flatten(0, -2))",
    "positions = aaaaaaaaaaaaaaaaaaaaaa if cache is None else bbbbbbbbbbbbbbbbbbbbbbbbbbbbb + ccccccccc",
    "grad = aaaaaaaaaa * (bbbbbbbbbbbbbb * cccccccccc * (dddddddddddd + eeeeeeee)) * ffffffffff",
    "grad = (aaaaaaaaaaaaaa * (bbbbbbbbbbbbbb + cccccccccc) * ddddddddd) * eeeeeeee * (ffffffffffff + gggg)",
    "grad = a * (1.0 + b * (cccccccccccccccc * dddddddddddddd * (eeeeeeeeeeeeeeee + ffffffffff * gggggggggg)))",
    'y = torch.einsum("...hn,hnk->...hk", aaaaaaaaaaaaaa.unflatten(-1, (H, C)), bbbbbbbbbbbbb.unflatten(0, (H, -1)))',
    "    hidden = aaaaaaaaaa(b)[:, None] + cccccc(ddddd)[:, None, 0]",
]


@pytest.mark.parametrize("line", LONG)
def test_a_long_line_fits_and_means_the_same(line: str) -> None:
    broken = fitted(line, 60)
    assert len(broken) > 1
    assert max(map(len, broken)) <= 60

    def dump(text: str) -> str:
        return ast.dump(ast.parse(f"if 1:\n  def f():\n    {text}"))

    assert dump("\n    ".join(broken).strip()) == dump(line.strip())


def test_a_line_that_fits_stays() -> None:
    assert fitted("x = f(a, b)", 11) == ("x = f(a, b)",)


def test_a_call_is_broken_at_its_last_brackets() -> None:
    assert fitted("x = aaaa(b).cccc(d, e)", 20) == ("x = aaaa(b).cccc(", "    d, e", ")")


def test_items_fill_lines_if_each_fits_on_one() -> None:
    assert fitted("x = f(aaaaaa, bbbbbb, cccccc)", 20) == ("x = f(", "    aaaaaa, bbbbbb,", "    cccccc,", ")")
    assert fitted("x = f(aaaaaa, bbbbbb, cccccc)", 18) == ("x = f(", "    aaaaaa,", "    bbbbbb,", "    cccccc,", ")")
    long = ("x = f(", "    aa,", "    bbb(", "        ccc, ddd", "    ),", "    ee,", ")")
    assert fitted("x = f(aa, bbb(ccc, ddd), ee)", 17) == long
