"""A process that hangs is noticed and named; one that is only slow is waited for."""

from pathlib import Path

from ranks import world

from specc.runtime.distributed import launch

SIZE = 3


def ended(stopped: int, folder: Path) -> list[tuple[int, str]]:
    """Exit code and stderr of the ranks that do not stop."""
    with world("hang_scene.py", SIZE, folder, str(stopped)) as ranks:
        return [(rank.wait(), rank.stderr.read_text()) for number, rank in enumerate(ranks) if number != stopped]


def test_a_rank_that_is_stopped_is_named(tmp_path: Path) -> None:
    ranks = ended(1, tmp_path)
    reports = [error for _, error in ranks if "error:" in error]
    assert reports == [error for code, error in ranks if code == 4] and len(reports) == 1, ranks
    assert "rank 1 has not answered for 2 s" in reports[0]
    assert all(code in (4, launch.PEER_LOST) for code, _ in ranks)


def test_a_slow_rank_is_waited_for(tmp_path: Path) -> None:
    assert ended(-1, tmp_path) == [(0, "")] * 3
