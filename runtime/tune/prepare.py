"""Compiles candidates, many at once, each in a process of its own that can fail without harm to the others."""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from specc.compiler.kernels.kernel import Site
from specc.runtime.errors import EnvironmentFailure, RunFailure, RuntimeFailure

SIZES = {"B": 2, "T": 128, "S": 128}  # of a first call: as divisible as the real ones, so that Triton compiles the same
WORKERS = 32
LONGEST = 200  # characters of a reason


@dataclass(frozen=True, slots=True)
class Prepared:
    """A candidate, by the number of its folder, and why it cannot be used; None where it can. What is not `lasting`
    says nothing of the candidate: its process was killed, perhaps for another's memory, or a package is missing."""

    index: int
    reason: str | None
    lasting: bool = True


def prepare(folders: Iterable[tuple[int, Path]], module: str, function: str, site: Site | None) -> Iterator[Prepared]:
    """Compiles the kernel in each folder and, where `site` is given, calls it once on few rows; yields as they end.

    What the compilers make lies in their caches on disk, where the caller finds it again. Raises EnvironmentFailure
    where this machine lacks what they need.
    """
    pool = ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1))
    try:
        waiting: dict[Future[tuple[str, str]], int] = {
            pool.submit(_apart, folder, module, function, site): index for index, folder in folders
        }
        for done in as_completed(waiting):
            kind, text = done.result()
            if kind == "environment":
                raise EnvironmentFailure(text, "tune needs nvcc, the CUTLASS headers and a cache of its own to write")
            yield Prepared(waiting[done], text or None, kind not in ("died", "missing"))
    finally:
        pool.shutdown(cancel_futures=True)


def _apart(folder: Path, module: str, function: str, site: Site | None) -> tuple[str, str]:
    """One candidate in a process of its own: what became of it, and why."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_one, args=(there, folder, module, function, site), daemon=True)
    process.start()
    there.close()
    try:
        told: tuple[str, str] = here.recv()
    except EOFError:
        process.join()
        return "died", f"its process ended with {process.exitcode} while it was compiled or called"
    process.join()
    return told


def _one(to: Connection, folder: Path, module: str, function: str, site: Site | None) -> None:
    from specc.runtime.native import compile_only

    try:
        for source in sorted(folder.glob("*.cu")):
            compile_only(source)
        if site is not None:
            import torch

            from specc.runtime.judge import inputs_of
            from specc.runtime.tune.measure import loaded

            call: Callable[..., Any] = loaded(folder, module, function)
            call(*inputs_of(site, SIZES, "cuda"))
            torch.cuda.synchronize()
    except RunFailure as error:
        to.send(("refused", short(error.message)))
    except RuntimeFailure as error:
        to.send(("environment", short(error.message)))
    except ModuleNotFoundError as error:  # which may be installed before the next search
        to.send(("missing", short(str(error))))
    except Exception as error:  # any kernel may fail in any way; the search goes on without it
        short_of_memory = "out of memory" in str(error).lower()
        to.send(("died" if short_of_memory else "refused", short(f"{type(error).__name__}: {error}")))
    else:
        to.send(("ready", ""))


def short(text: str) -> str:
    """The first line that says something, not too long."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
