"""How long work tells of itself where there is no terminal."""

import pytest

from specc.cli.output import Stages


@pytest.mark.parametrize(("every", "more"), [(0.0, ["score         50 % of 4", "score        100 % of 4"]), (60.0, [])])
def test_a_line_a_stage_and_one_each_so_often(
    every: float, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    stages = Stages(every)
    for done in (1, 2, 4):
        stages("score", done, 4)
    stages("write", 1, 1)
    output = capsys.readouterr()
    assert output.out == "" and output.err.splitlines() == ["score ...", *more, "write ..."]
