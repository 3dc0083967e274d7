"""Finds the run that a training command resumes, and restores its newest checkpoint."""

from pathlib import Path

import torch

from specc.runtime.log import Say
from specc.runtime.storage import checkpoint
from specc.runtime.storage.committed import sweep
from specc.runtime.storage.run_directory import Run, RunDirectoryError, is_run, lasting, newest_run
from specc.runtime.train.trainer import Trainer


def run_to_resume(directory: Path | None, name: str) -> Path | None:
    """Returns the directory of the run to resume, or None if no such run exists.

    `directory` is the run directory that the user names. If `directory` is None, the result is the newest run of the
    spec `name`.
    """
    directory = directory or newest_run(name)
    return directory if directory is not None and is_run(directory) else None


def restore_newest(begun: Run, run: Run, trainer: Trainer, say: Say) -> None:
    """Restores the newest valid checkpoint of a run.

    Args:
        begun: the run as it was recorded at its start, with the previous path of its data.
        run: the same run, with the current path of its data.
        trainer: the trainer that receives the state of the checkpoint.
        say: the function that receives messages for the user.

    Raises:
        IntegrityError: if checkpoints were written, but none of them is valid.
        RunDirectoryError: if the path of the data has changed, and no checkpoint can prove that the data are the same.
    """
    moved = run.data != lasting(begun.data)

    def newest() -> Path | None:
        sweep(run.checkpoints)
        return checkpoint.latest_of(run, say)

    path = trainer.world.first(newest)
    if path is None:
        # Without a checkpoint, only recorded digests can prove that the data are the same
        if moved and begun.data_digests is None:
            message = f"{run.directory} was started with the data {begun.data}, not with {run.data}"
            raise RunDirectoryError(message, "the run has no checkpoint yet: start a new run")
        return
    trainer.restore(checkpoint.load(path))
    if moved:
        say(f"the data of the run are at {run.data} now")
        if trainer.world.rank == 0:
            run.record()
    say(f"resuming after step {trainer.step} from {path}")
    before, now = checkpoint.read_state(path).threads, torch.get_num_threads()
    if before != now:
        say(f"the run used {before} threads and now has {now}: sums are rounded in another order than before")
