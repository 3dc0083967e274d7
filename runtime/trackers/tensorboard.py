"""TensorBoard: event files in the folder `tensorboard` of the run. `tensorboard --logdir RUN` shows them."""

from collections.abc import Mapping

from specc.runtime.trackers.tracker import TrackedRun, Tracker

FOLDER = "tensorboard"


class TensorBoard(Tracker):
    """Writes event files with `torch.utils.tensorboard`.

    If a resumed run repeats steps, TensorBoard hides the earlier records of the repeated steps.
    """

    name, package, extra = "tensorboard", "tensorboard", "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.directory / FOLDER), purge_step=run.step + 1 if run.step else None)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
