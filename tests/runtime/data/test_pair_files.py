"""Files of pairs of lines: what stands in the way is told by file and line."""

from pathlib import Path

import numpy as np
import pytest
from pair_models import CHARS

from specc.compiler.spec.data.lines import LinesData
from specc.runtime.data.errors import LineError
from specc.runtime.data.lines.line_file import LineFile
from specc.runtime.data.tokenizers.characters import CharTokenizer

TOKENIZER = CharTokenizer(CHARS)
GOOD = "x*(x-1)=x**2-x\n"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            "(" + "9" * 40 + "*x)=z\n",
            "has 44 characters; a context of 30 tokens has room for 29 characters and a stop token",
        ),
        ("x=" + "9" * 40 + "\n", "has 40 characters"),
        ("x/y=z\n", "'x/y' has '/', which is not in the vocabulary"),
    ],
)
def test_a_line_that_does_not_fit_is_named(bad: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text(GOOD + GOOD + bad + GOOD)
    with pytest.raises(LineError) as error:
        LineFile.read(str(path), LinesData(kind="lines"), TOKENIZER, 30)
    assert error.value.message.startswith(f"{path}:3: ") and message in error.value.message


@pytest.mark.parametrize("start", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_marks_and_ends_of_lines_are_no_part_of_them(start: str, end: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes((start + GOOD.replace("\n", end) * 2).encode())
    file = LineFile.read(str(path), LinesData(kind="lines"), TOKENIZER, 30)
    assert file.sources == ["x*(x-1)"] * 2 and file.targets == ["x**2-x"] * 2
    assert np.array_equal(file.pairs.source, TOKENIZER.encode_rows(file.sources, 30)) and len(file.pairs) == 2
