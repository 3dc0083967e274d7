"""Run directories with a log and no weights, for tests of what reads logs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from run_samples import small_spec

from specc.runtime.storage.data_digests import DataDigests
from specc.runtime.storage.run_directory import Run

TRAIN = "a" * 64


def logged_run(
    folder: Path,
    nats: float | None,
    overrides: Sequence[str] = (),
    *,
    val: str | None = "b" * 64,
    tokens: int = 1000,
    data: str = "stdlib",
    bits: float = 1.0,
) -> Path:
    """A run of four steps of 100 tokens in two seconds each, and a final validation; without `nats`, it was stopped.

    Args:
        folder: the run directory.
        nats: the final loss of the averaged weights, in nats per token. Raw weights have 1 more.
        overrides: overrides of the small gpt_mini.
        val: the digest of the validation split; None for a run of an older specc.
        tokens: the number of scored tokens.
        data: the data of the run.
        bits: bits per byte, per nat per token.
    """
    spec = small_spec(*overrides)
    digests = DataDigests(train=TRAIN, val=val) if val is not None else None
    run = Run(folder, spec, "cpu", data, tuple(overrides), data_digests=digests).create()
    events: list[dict[str, Any]] = [{"event": "start", "step": 0}]
    for step in range(1, 5):
        at = {"step": step, "loss": 5.0 - step, "seconds": 2.0 * step, "tokens_per_second": 50.0, "tokens": 100}
        events.append({"event": "step", **at})
    if nats is None:
        events.append({"event": "stopped", "step": 4, "message": "pre-empted by SIGTERM"})
    else:
        for weights, loss in (("raw", nats + 1), ("average", nats)):
            values = {"nats": loss, "tokens": tokens, "bpb": loss * bits, "bpb_pieces": loss * bits}
            events.append({"event": "validation", "step": 4, "weights": weights, **values})
        events.append({"event": "end", "step": 4, "seconds": 8.0, "complete": True, "weights": "average"})
    run.log.write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder
