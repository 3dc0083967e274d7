"""Compiles candidates, many at once, each in a process of its own that can fail without harm."""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specc.compiler.kernels.kernel import Site
from specc.runtime.errors import RuntimeFailure

SIZES = {"B": 2, "T": 128, "S": 128}  # of a first call: as divisible as the real ones, so that Triton compiles the same
WORKERS = 32
LONGEST = 200  # characters of a reason


@dataclass(frozen=True, slots=True)
class Prepared:
    """A candidate's folder, and why it cannot be used; None where it can."""

    index: int
    reason: str | None


def prepare(folders: Iterable[tuple[int, Path]], module: str, function: str, site: Site | None) -> Iterator[Prepared]:
    """Compiles the kernel in each folder and, where `site` is given, calls it once on few rows; yields as they end.

    What the compilers make lies in their caches on disk, where the caller finds it again.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(WORKERS, os.cpu_count() or 1), context) as pool:
        waiting: dict[Future[str | None], int] = {
            pool.submit(_one, folder, module, function, site): index for index, folder in folders
        }
        for done in as_completed(waiting):
            try:
                reason = done.result()
            except BrokenProcessPool:
                reason = "its process died while it was compiled or called"
            yield Prepared(waiting[done], reason)


def _one(folder: Path, module: str, function: str, site: Site | None) -> str | None:
    from specc.runtime.native import compile_only

    try:
        for source in sorted(folder.glob("*.cu")):
            compile_only(source)
        if site is not None:
            import torch

            from specc.runtime.tune.measure import inputs_of, loaded

            call: Callable[..., Any] = loaded(folder, module, function)
            call(*inputs_of(site, SIZES))
            torch.cuda.synchronize()
    except RuntimeFailure as error:
        return short(error.message)
    except Exception as error:  # any kernel may fail in any way; the search goes on without it
        return short(f"{type(error).__name__}: {error}")
    return None


def short(text: str) -> str:
    """The first line that says something, not too long."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
