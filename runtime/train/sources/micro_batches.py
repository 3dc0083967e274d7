"""The number of micro-batches per step."""

from specc.compiler.changing_values import last
from specc.compiler.spec.train import TrainSpec
from specc.runtime.errors import RuntimeFailure


class BatchError(RuntimeFailure):
    """Raised if the batch in the spec cannot be divided into micro-batches."""

    code = "U008"
    exit_code = 2


def micro_batches(train: TrainSpec, window: int, world: int = 1, size: int | None = None) -> int:
    """Returns the number of backward passes per step on each process.

    Args:
        train: the section `train` of the spec.
        window: the number of tokens per row.
        world: the number of processes.
        size: the size of a step: in rows if `train.batch` is set, otherwise in tokens. None selects the size of the
            last step of the run.

    Raises:
        BatchError: if the processes cannot divide a step evenly into micro-batches.
    """
    by_rows, rows = train.batch is not None, train.at_once(world)
    size = size or last(train.step_size)
    at_once = rows * world if by_rows else rows * window * world
    count, rest = divmod(size, at_once)
    if rest or not count:
        processes = f" x {world} processes" if world > 1 else ""
        what, unit = ("batch", "") if by_rows else ("tokens_per_step", f" x {window} tokens")
        message = f"train.{what} {size:,} is not a multiple of micro_batch {rows}{unit}{processes} = {at_once:,}"
        near = " or ".join(f"{n * at_once:,}" for n in (count, count + 1) if n)
        raise BatchError(message, f"use {near}, or another micro_batch")
    return count
