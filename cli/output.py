"""The output of commands: results on stdout; notes, progress and errors on stderr."""

import io
import os
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import rich_click as click
from click import get_current_context

FORMATS = ("text", "json", "github")


class _Notes(io.FileIO):
    """Standard error as a file that ignores write errors: a closed pipe, a closed terminal or a full disk does not end
    a command. Each line begins with `prefix`."""

    def __init__(self, descriptor: int, prefix: bytes) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._prefix, self._starts_line = prefix, True

    def write(self, data: Any) -> int:
        content = bytes(data)
        lines = content.splitlines(keepends=True)
        shown = content if not self._prefix else b"".join(map(self._prefixed, lines))
        try:
            while shown:
                shown = shown[super().write(shown) or 0 :]
        except OSError:
            pass
        return len(content)

    def _prefixed(self, line: bytes) -> bytes:
        prefix, self._starts_line = self._prefix if self._starts_line else b"", line.endswith(b"\n")
        return prefix + line


def keep_notes_going() -> None:
    """Makes this process ignore errors of writing to standard error. If it is one of several that train together, its
    lines begin with its rank, unless that is 0."""
    if sys.stderr is None:
        return
    rank = os.environ.get("RANK", "0")
    prefix = f"[rank {rank}] ".encode() if rank != "0" and "WORLD_SIZE" in os.environ else b""
    buffer = io.BufferedWriter(_Notes(sys.stderr.fileno(), prefix))
    sys.stderr = io.TextIOWrapper(buffer, sys.stderr.encoding, "backslashreplace", line_buffering=True)


def requested_format(arguments: Sequence[str]) -> str:
    """Returns the error format that a command line requests, even if the rest of the command line is invalid."""
    form = FORMATS[0]
    for option, value in pairwise([*arguments, ""]):
        if option == "--":
            break
        name, _, joined = option.partition("=")
        if name == "--format" and (choice := joined or value) in FORMATS:
            form = choice
    return form


def error_format() -> str:
    """Returns the error format that the running command requests."""
    return str(get_current_context().obj)


def show(error: Exception, form: str) -> None:
    """Shows an error as text on stderr, or as JSON or GitHub annotations on stdout."""
    from specc.compiler.errors import SpeccError, render

    message, hint = getattr(error, "message", str(error)), getattr(error, "hint", "")
    if isinstance(error, SpeccError):
        click.echo(render(error, form, colored()), err=form == "text")  # type: ignore[arg-type]
    elif form == "text":
        click.echo(f"error: {message}" + (f"\n  = help: {hint}" if hint else ""), err=True)
    else:
        show(SpeccError(message, hint), form)


def show_usage(error: click.ClickException, form: str) -> None:
    """Shows an error of the command line itself. Click provides the message and, for text, the layout."""
    if form == "text":
        error.show()
        return
    context = getattr(error, "ctx", None)
    from specc.compiler.errors import SpeccError

    hint = f"{context.command_path if context is not None else 'specc'} --help"
    show(SpeccError(error.format_message(), hint), form)


def colored() -> bool:
    """Returns whether errors are shown in color."""
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def tell(note: str) -> None:
    """Prints a note on stderr, unless it is empty."""
    if note:
        click.echo(note, err=True)


def say(line: str) -> None:
    """Prints a line of progress on stderr. Results go to stdout."""
    click.echo(line, err=True)


class Stages:
    """Shows the progress of long work: a bar on a terminal; elsewhere one line per stage, and a further line every
    `every` seconds."""

    def __init__(self, every: float = 30.0) -> None:
        self.stage, self._every, self._last = "", every, 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        share, now = f"{stage:<12} {100 * done // max(total, 1):>3} %", time.monotonic()
        if sys.stderr.isatty():
            click.echo(f"\r{share}", err=True, nl=done >= total)
        elif stage != self.stage:
            click.echo(f"{stage} ...", err=True)
            self._last = now
        elif now - self._last >= self._every:
            click.echo(f"{share} of {total:,}", err=True)
            self._last = now
        self.stage = stage
