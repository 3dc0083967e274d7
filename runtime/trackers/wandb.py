"""Weights & Biases: files in the folder `wandb` of the run. Nothing is uploaded unless WANDB_MODE is `online`."""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from specc.runtime.trackers.tracker import TrackedRun, Tracker


class WeightsAndBiases(Tracker):
    """Writes files with `wandb`, by default without a network connection. `wandb sync` can upload the files later.

    A resumed run keeps its id.
    """

    name, package, extra = "wandb", "wandb", "wandb"

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        directory = run.directory.absolute()
        identity = hashlib.sha256(f"{directory} {run.digest}".encode()).hexdigest()[:16]
        self._run: Any = wandb.init(
            project=run.project,
            name=directory.name,
            id=identity,
            resume="allow",
            dir=str(directory),
            config=dict(run.config),
            mode=os.environ.get("WANDB_MODE", "offline"),
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()
