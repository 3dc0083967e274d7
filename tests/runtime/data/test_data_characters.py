"""The vocabulary of characters: ids, marks, rows of a fixed width, and what cannot be encoded."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from specc.compiler.characters import Vocabulary
from specc.runtime.data.errors import DataError
from specc.runtime.data.lines.polynomial import SYMBOLS, draw
from specc.runtime.data.tokenizers.characters import CharTokenizer, lines_of


def test_ids_are_the_marks_and_then_the_characters_in_order() -> None:
    tokens = CharTokenizer("(7-3*z")
    assert (tokens.pad, tokens.start, tokens.stop, tokens.vocab) == (0, 1, 2, 9)
    assert tokens.encode("(7-3*z").tolist() == [3, 4, 5, 6, 7, 8]
    assert tokens.encode_rows(["z", "", "7-3"], 4).tolist() == [[8, 2, 0, 0], [2, 0, 0, 0], [4, 5, 6, 2]]
    assert tokens.encode_rows(["z"], 2).dtype == np.uint8


def test_decoding_ends_at_the_first_stop() -> None:
    tokens = CharTokenizer("abc")
    assert tokens.decode([1, 3, 0, 4, 2, 5, 2]) == "ab"  # start and pad are no text
    assert tokens.decode([3, 4, 5]) == "abc"
    assert tokens.decode([]) == ""
    assert tokens.decode_rows(np.array([[2, 3], [3, 2], [0, 0], [5, 5]])) == ["", "a", "", "cc"]
    with pytest.raises(DataError, match="no token 6"):
        tokens.decode([6])
    with pytest.raises(DataError, match="no token -1"):
        tokens.decode([-1])


@given(st.lists(st.text("abcαβ€😀 =", max_size=9), max_size=5))
def test_any_text_of_the_vocabulary_comes_back(lines: list[str]) -> None:
    tokens = CharTokenizer("€abc😀 =βα")
    rows = tokens.encode_rows(lines, 10)
    assert rows.shape == (len(lines), 10)
    assert tokens.decode_rows(rows) == lines
    assert [tokens.decode(tokens.encode(line)) for line in lines] == lines


def test_lines_of_the_task_are_encoded_as_bytes_or_as_text() -> None:
    tokens, lines = CharTokenizer(SYMBOLS), draw("train", 1, 0, 500)
    left = [text.partition("=")[0] for text in lines.texts()]
    rows = tokens.encode_codes(lines.factors(), 30)
    assert np.array_equal(rows, tokens.encode_rows(left, 30))
    assert tokens.decode_rows(rows) == left


def test_what_does_not_fit_is_refused() -> None:
    tokens = CharTokenizer("ab")
    with pytest.raises(DataError, match=r"'aXb' has 'X'"):
        tokens.encode_rows(["ab", "aXb"], 9)
    with pytest.raises(DataError, match=r"'b\U0001F600' has"):
        tokens.encode("b😀")
    with pytest.raises(DataError, match="'aab' has 3 characters; a context of 3 tokens has room for 2"):
        tokens.encode_rows(["ab", "aab"], 3)
    with pytest.raises(DataError, match="the character 'a' twice"):
        CharTokenizer("aba")
    for chars in ("", "a\0", "".join(map(chr, range(200, 454)))):
        with pytest.raises(DataError, match="1 to 253"):
            CharTokenizer(chars)


def test_what_a_spec_may_name_can_be_encoded() -> None:
    """As many characters as there are ids in a byte; one more is refused in the spec already."""
    chars = "".join(map(chr, range(0x4E00, 0x4E00 + 254)))
    assert Vocabulary(chars=chars[:-1]).size == CharTokenizer(chars[:-1]).vocab == 256
    assert CharTokenizer(chars[:-1]).encode(chars[-2]).tolist() == [255]
    with pytest.raises(ValidationError, match="at most 253"):
        Vocabulary(chars=chars)


def test_lines_end_at_newlines_alone() -> None:
    assert lines_of("a\x0bb\u2028c\r\nd\n") == ["a\x0bb\u2028c", "d"]
    assert lines_of("") == [] and lines_of("\n") == [""] and lines_of("a\n\nb") == ["a", "", "b"]


def test_a_character_of_zero_is_no_end() -> None:
    with pytest.raises(DataError, match="which is not in the vocabulary"):
        CharTokenizer("ab").encode_rows(["ab", "a\0b"], 8)
