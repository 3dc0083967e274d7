"""The log of a run, read back, also of one that was killed, resumed, or written by an older specc."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from specc.runtime.storage.run_history import RunHistory


def step(number: int, loss: float = 1.0, seconds: float | None = None, **more: Any) -> dict[str, Any]:
    at = float(number) if seconds is None else seconds
    return {"event": "step", "step": number, "loss": loss, "seconds": at, "tokens_per_second": 10.0, **more}


def validation(number: int, weights: str, nats: float) -> dict[str, Any]:
    return {"event": "validation", "step": number, "weights": weights, "nats": nats, "tokens": 9}


def end(number: int, complete: bool = True, weights: str = "average") -> dict[str, Any]:
    return {"event": "end", "step": number, "seconds": float(number), "complete": complete, "weights": weights}


def history(path: Path, *events: dict[str, Any], torn: str = "") -> RunHistory:
    log = path / "log.jsonl"
    log.write_text("".join(json.dumps(event) + "\n" for event in events) + torn)
    return RunHistory.read(log)


START = {"event": "start", "step": 0}


def test_only_a_complete_run_has_a_final_value(tmp_path: Path) -> None:
    """Not one that was killed before its average was scored, nor one that ended early."""
    scores = [validation(2, "raw", 4.0), validation(2, "average", 3.0)]
    assert RunHistory.read(tmp_path / "none").final is None
    assert history(tmp_path, START, *scores).final is None
    assert history(tmp_path, START, *scores, end(2, complete=False)).final is None
    assert history(tmp_path, START, *scores, torn='{"event": "en').final is None
    result = history(tmp_path, START, *scores, end(2))
    assert result.final == {"nats": 3.0, "tokens": 9} and result.scored("raw") == {"nats": 4.0, "tokens": 9}
    assert history(tmp_path, START, scores[0], end(2, weights="raw")).final == {"nats": 4.0, "tokens": 9}


@pytest.mark.parametrize("damaged", ['{"event": "validation", "step": 4, "wei', {"nats": math.nan}, {"bpb": "x"}])
def test_the_final_value_is_of_the_last_step(tmp_path: Path, damaged: str | dict[str, Any]) -> None:
    """The validation of an earlier step does not replace a damaged one."""
    known = [START, *(validation(n, weights, 5.0 - n) for n in (2, 4) for weights in ("raw", "average"))]
    assert (whole := history(tmp_path, *known, end(4))).final == {"nats": 1.0, "tokens": 9}
    assert whole.scored("raw") == whole.final
    text = damaged if isinstance(damaged, str) else json.dumps({**known[-1], **damaged})
    result = history(tmp_path, *known[:-1], torn=f"{text}\n{json.dumps(end(4))}\n")
    assert result.final is None and result.complete and result.unreadable == 1
    assert result.scored("raw") == {"nats": 1.0, "tokens": 9}


def test_a_resumed_run_counts_each_step_once(tmp_path: Path) -> None:
    """It was killed after step 3, and its newest checkpoint was that of step 1."""
    before = [START, *(step(n, 9.0, tokens=5) for n in (1, 2, 3)), validation(2, "raw", 8.0)]
    again = [{"event": "start", "step": 1}, step(2, 2.0, tokens=5), step(3, 1.5, tokens=5), validation(3, "raw", 1.0)]
    result = history(tmp_path, *before, *again, end(3, weights="raw"))
    assert [(s.step, s.loss, s.tokens) for s in result.steps] == [(1, 9.0, 5), (2, 2.0, 10), (3, 1.5, 15)]
    assert [v.step for v in result.validations] == [3]
    assert result.final == {"nats": 1.0, "tokens": 9} and result.seconds == 3.0 and result.tokens_per_second == 5.0


def test_an_early_end_that_went_on_is_complete(tmp_path: Path) -> None:
    first = [START, step(1), validation(1, "average", 7.0), end(1, complete=False)]
    more = [{"event": "start", "step": 1}, step(2), validation(2, "average", 3.5), end(2)]
    assert history(tmp_path, *first, *more).final == {"nats": 3.5, "tokens": 9}


def test_tokens_of_an_older_log_follow_from_the_rate(tmp_path: Path) -> None:
    result = history(tmp_path, START, step(1, seconds=0.5), step(2, seconds=2.5))
    assert [s.tokens for s in result.steps] == pytest.approx([5.0, 25.0])
    assert result.seconds == 2.5 and result.message == ""


def test_the_reason_of_the_last_stop(tmp_path: Path) -> None:
    stopped = {"event": "stopped", "step": 1, "message": "pre-empted by SIGTERM"}
    assert history(tmp_path, START, step(1), stopped).message == "pre-empted by SIGTERM"
    assert history(tmp_path, START, step(1), stopped, {"event": "start", "step": 1}).message == ""


def test_a_skipped_step_may_have_no_loss(tmp_path: Path) -> None:
    skipped = {key: value for key, value in step(2).items() if key != "loss"} | {"skipped": True}
    result = history(tmp_path, START, step(1), skipped, step(3))
    assert result.unreadable == 0 and [s.step for s in result.steps] == [1, 2, 3]
    assert result.steps[1].loss == result.steps[0].loss and result.steps[1].tokens > result.steps[0].tokens


@pytest.mark.parametrize("event", [step(2), validation(2, "raw", 1.0), end(2)], ids=lambda event: event["event"])
def test_a_record_that_lacks_a_field_is_skipped(tmp_path: Path, event: dict[str, Any]) -> None:
    whole = [START, step(1), validation(1, "raw", 4.0), end(1, weights="raw")]
    known = history(tmp_path, *whole)
    assert known.unreadable == 0 and known.final == {"nats": 4.0, "tokens": 9}
    for name in event.keys() - {"event", "complete"}:
        for damaged in ({key: event[key] for key in event if key != name}, {**event, name: None}):
            known.unreadable = 1
            assert history(tmp_path, *whole, damaged) == known
