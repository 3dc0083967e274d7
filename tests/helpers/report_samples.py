"""Logs of runs for tests of reports, and a text that would break out of HTML, SVG, Markdown and Jinja."""

import json
from typing import Any

from specc.runtime.storage.run_directory import Run

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }} </pre></svg><!--'


def write_log(run: Run, *records: dict[str, Any]) -> None:
    run.log.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def trained_log(run: Run, steps: int = 3) -> None:
    """A log whose every number is another."""
    write_log(
        run,
        {"event": "machine", "name": "Test Processor 9000", "system": "Linux", "cores": 7},
        {"event": "start", "step": 0, "device": "cpu", "processes": 1, "threads": 5, "torch": "2.12.7",
         "python": "3.11.5"},
        *(
            {"event": "step", "step": i, "loss": 5 - i / 7, "lr": i / steps, "grad_norm": 0.5 + i / 100,
             "tokens_per_second": 1000 + i, "seconds": i / 3, "memory_bytes": 4e8 + i}
            for i in range(1, steps + 1)
        ),
        {"event": "validation", "step": steps, "weights": "raw", "nats": 2.5, "tokens": 3111, "bpb": 3.4567,
         "bpb_pieces": 3.4567, "document_bytes": 3099, "piece_bytes": 3099},
        {"event": "validation", "step": steps, "weights": "average", "nats": 2.25, "tokens": 3111, "bpb": 3.2109,
         "bpb_pieces": 3.2109, "document_bytes": 3099, "piece_bytes": 3099},
        {"event": "end", "step": steps, "seconds": 12.34, "complete": True, "weights": "average"},
    )  # fmt: skip
