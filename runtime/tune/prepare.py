"""Compiles many candidates in parallel, each in a separate process. The failure of one candidate does not affect the
others.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specc.compiler.kernels.kernel import Site
from specc.runtime.errors import EnvironmentFailure, RunFailure, RuntimeFailure
from specc.runtime.model.load import import_file

if TYPE_CHECKING:
    import torch

SIZES = {
    "B": 2,
    "T": 128,
    "S": 128,
}  # the rows of a first call, which are as divisible as the real sizes, so that Triton compiles the same code
WORKERS = 32
LONGEST = 200  # the maximum number of characters of a reason
DEADLINE = 900.0  # in seconds; nvcc takes 100 to 200 seconds if every core runs a compilation
TICK = 0.2  # the seconds between two checks of the deadline
ENDING = 30.0  # the seconds within which a process must exit after it has sent its result, or after it was killed


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result of compiling a candidate.

    Attributes:
        index: the index of the folder of the candidate.
        reason: the reason why the candidate cannot be used; None if it can be used.
        lasting: False if the candidate may become usable, for example after a package is installed.
    """

    index: int
    reason: str | None
    lasting: bool = True


def prepare(
    folders: Iterable[tuple[int, Path]],
    module: str,
    function: str,
    site: Site | None,
    device: "torch.device | str" = "cuda",
) -> Iterator[Prepared]:
    """Compiles the kernel in each folder. With `site`, the function also calls the kernel twice: on few rows and on
    many rows.

    If a kernel takes longer than DEADLINE, its process is killed. The compilers store compiled code in their caches on
    disk, so that the caller can load the kernels without compiling them again.

    Args:
        folders: pairs (index, folder).
        module: the name of the module in each folder.
        function: the name of the function in the module.
        site: the node that determines the input types of the kernel. None if the kernels are only compiled.
        device: the device on which the kernel is called.

    Returns:
        The results, in the order in which the candidates finish.

    Raises:
        EnvironmentFailure: if this machine lacks something that the compilers need.
    """
    pool, stop = ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1)), threading.Event()
    try:
        waiting: dict[Future[tuple[str, str]], int] = {
            pool.submit(_apart, stop, (folder, module, function, site, str(device))): index for index, folder in folders
        }
        for done in as_completed(waiting):
            kind, text = done.result()
            if kind == "environment":
                raise EnvironmentFailure(
                    text, "install nvcc and the CUTLASS headers, and make the cache directory writable"
                )
            yield Prepared(waiting[done], text or None, kind not in ("died", "missing"))
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _apart(stop: threading.Event, arguments: tuple[object, ...]) -> tuple[str, str]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_compile, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    began = time.monotonic()
    while not here.poll(TICK):
        if stop.is_set() or time.monotonic() - began > DEADLINE:
            _end(process)
            return "refused", f"did not finish within {DEADLINE:.0f} s"
    try:
        outcome: tuple[str, str] | None = here.recv()
    except EOFError:
        outcome = None
    process.join(ENDING)
    if process.is_alive():
        _end(process)
    return outcome or ("died", f"its process ended early with exit code {process.exitcode}")


def _end(process: BaseProcess) -> None:
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):  # before its first line, the process has no process group
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join(ENDING)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _compile(to: Connection, folder: Path, module: str, function: str, site: Site | None, device: str) -> None:
    os.setsid()  # a separate process group can be killed as a whole, and does not receive Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from specc.runtime.support.native import compile_only

    try:
        for source in sorted(folder.glob("*.cu")):
            compile_only(source)
        if site is not None:
            import torch

            from specc.runtime.verify.judge import inputs_of, many_sizes, within

            call: Callable[..., Any] = loaded(folder, module, function)
            call(*inputs_of(site, site.node.op.site_sizes(within(site, SIZES)), device))
            if (sizes := many_sizes(site, device)) is not None:
                torch.cuda.synchronize()
                with contextlib.suppress(
                    torch.OutOfMemoryError
                ):  # many processes share the memory now, but not during measurements
                    call(*inputs_of(site, sizes, device))
                torch.cuda.synchronize()
    except RunFailure as error:
        to.send(("refused", short(error.message)))
    except RuntimeFailure as error:
        to.send(("environment", short(error.message)))
    except ModuleNotFoundError as error:  # the user may install the package before the next search
        to.send(("missing", short(str(error))))
    except Exception as error:  # a kernel may raise any exception; the search continues with the other kernels
        short_of_memory = "out of memory" in str(error).lower()
        to.send(("died" if short_of_memory else "refused", short(f"{type(error).__name__}: {error}")))
    else:
        to.send(("ready", ""))


def short(text: str) -> str:
    """Returns the first nonempty line of a text, shortened to LONGEST characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "unknown reason")
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."


def loaded(folder: Path, module: str, function: str) -> Callable[..., Any]:
    """Imports a generated module from a folder, and returns one of its functions."""
    call: Callable[..., Any] = vars(import_file(folder, module))[function]
    return call
