"""Training runs of the toy model, started or resumed in this process."""

from functools import partial
from pathlib import Path

import torch
from log_lines import read_log
from run_samples import gpt_mini
from toy import Hook, Toy, Watch, stream, trainer

from specc.compiler.spec.train import TrainSpec
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.log import Reporter, RunLog
from specc.runtime.metrics.validation import Validation
from specc.runtime.storage import checkpoint
from specc.runtime.storage.run_directory import Run
from specc.runtime.train.loop import Limits, Loop, TrainResult


def go(
    folder: Path,
    name: str,
    train: TrainSpec | None = None,
    hook: Hook | None = None,
    limits: Limits | None = None,
    model: Toy | None = None,
    said: list[str] | None = None,
) -> TrainResult:
    """Starts or resumes the run `name`."""
    run = Run(folder / name, gpt_mini(), "cpu", "text")
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    run_trainer = trainer(folder, train, model)
    newest = checkpoint.latest(run.checkpoints, lambda text: None)
    if newest is not None:
        torch.manual_seed(12345)
        run_trainer.restore(checkpoint.load(newest))
    log = RunLog(run.log)
    validation = Validation(stream(folder, "val"), ByteTokenizer(), 8, 200)
    say = (said if said is not None else []).append
    try:
        save = partial(checkpoint.save, run.checkpoints)
        return Loop(run, run_trainer, validation, Reporter(log, Watch(hook), say), limits or Limits(), save).run()
    finally:
        log.close()
        run_trainer.loader.close()


def losses(folder: Path, name: str) -> list[float]:
    records = [record for record in read_log(folder / name / "log.jsonl") if record["event"] == "step"]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]
