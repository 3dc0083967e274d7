"""Compiles CUDA C++ in the background."""

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from specc.compiler.plan.plan import Choice
from specc.runtime.support.native import compile_only


class Compiler:
    """Compiles all CUDA C++ files of a generated folder in the background, while torch.compile runs.

    `seconds` is the time from the start until all files are compiled.
    """

    def __init__(self, directory: Path) -> None:
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._began, self.seconds = time.perf_counter(), 0.0
        self._waiting: dict[str, Future[None]] = {
            source.name: self._pool.submit(self._compile, source) for source in sorted(directory.glob("*.cu"))
        }

    def _compile(self, source: Path) -> None:
        compile_only(source)
        self.seconds = max(self.seconds, time.perf_counter() - self._began)

    def ready(self, choice: Choice) -> None:
        for name in choice.rendered.files:
            if name in self._waiting:
                self._waiting[name].result()

    def all(self) -> None:
        for future in self._waiting.values():
            future.result()

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
