"""The output of commands.

Commands print results on stdout. They print notes and progress on stderr. The option `--format` selects the format of
errors.
"""

import codecs
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
from click import get_current_context

if TYPE_CHECKING:
    from specc.compiler.errors import Coded, Diagnostic

FORMATS = ("text", "json", "github", "sarif")
# The formats in which stdout is one document with all errors and findings of the command
DOCUMENTS = ("json", "sarif")
format_option = click.Option(
    ["--format"],
    type=click.Choice(FORMATS),
    default=FORMATS[0],
    expose_value=False,
    help="Format of errors and findings.",
)


class _Stream(io.FileIO):
    """Standard output or standard error, as a file that ignores one class of write errors.

    Args:
        descriptor: the file descriptor.
        ignored: the class of errors to ignore.
        prefix: the text that begins each line.
    """

    def __init__(self, descriptor: int, ignored: type[OSError], prefix: bytes = b"") -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.failed = False  # whether an error was ignored
        self._ignored, self._prefix, self._starts_line = ignored, prefix, True

    def write(self, data: Any) -> int:
        content = bytes(data)
        lines = content.splitlines(keepends=True)
        shown = content if not self._prefix else b"".join(map(self._prefixed, lines))
        try:
            while shown:
                shown = shown[super().write(shown) or 0 :]
        except self._ignored:
            self.failed = True
        return len(content)

    def _prefixed(self, line: bytes) -> bytes:
        prefix, self._starts_line = self._prefix if self._starts_line else b"", line.endswith(b"\n")
        return prefix + line


def keep_going() -> None:
    """Makes this process continue after the reader of its output has ended, so that the exit code still states the
    result.

    Standard output then ignores a closed pipe, and standard error ignores all write errors. With several processes,
    each line on standard error of a process other than rank 0 begins with the rank. In an ASCII locale, both streams
    use UTF-8. If the caller has closed a standard stream, an empty stream replaces it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the caller has closed this stream
            nothing = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, io.TextIOWrapper(open(nothing, f"{mode}b", closefd=False), "utf-8"))  # noqa: SIM115
    results = _Stream(sys.stdout.fileno(), BrokenPipeError)
    sys.stdout = _text(results, sys.stdout.encoding, sys.stdout.errors, results.isatty())
    rank = os.environ.get("RANK", "0")
    prefix = f"[rank {rank}] ".encode() if rank != "0" and "WORLD_SIZE" in os.environ else b""
    stream = _Stream(sys.stderr.fileno(), OSError, prefix)
    sys.stderr = _text(stream, sys.stderr.encoding, "backslashreplace", True)


def _text(stream: _Stream, encoding: str, errors: str | None, line_buffering: bool) -> io.TextIOWrapper:
    # Otherwise, Click would replace characters that are not ASCII by question marks
    encoding = "utf-8" if codecs.lookup(encoding).name == "ascii" else encoding
    return io.TextIOWrapper(io.BufferedWriter(stream), encoding, errors, line_buffering=line_buffering)


def stream(text: str) -> None:
    """Prints a part of a long result. Raises BrokenPipeError if the reader has closed the pipe."""
    click.echo(text, nl=False)
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Stream) and raw.failed:
        raise BrokenPipeError


class Output:
    """The errors and findings of one command.

    A finding is a problem that a command searches for, such as a failed check. In the text format, errors go to stderr,
    and findings go to stdout. As GitHub annotations, both go to stdout. With a format in DOCUMENTS, stdout contains one
    document with all errors and findings, and all other output goes to stderr. With `--json`, stdout contains the JSON
    result, which includes the findings. If a command with `--json` fails, stdout contains a JSON document with the
    errors.

    Args:
        arguments: the arguments of the command line, which may be invalid.
        complete: a function that is called when the work of the command is complete and saved.
    """

    def __init__(self, arguments: Sequence[str] = (), complete: Callable[[], None] = lambda: None) -> None:
        self.complete = complete
        self.form, self._has_result = FORMATS[0], False
        self.delegated = False  # whether the command runs in other processes, which show errors and findings themselves
        self._errors: list[Diagnostic] = []
        self._findings: list[Diagnostic] = []
        for option, value in pairwise([*arguments, ""]):
            if option == "--":
                break
            name, _, joined = option.partition("=")
            if name == "--format" and (choice := joined or value) in FORMATS:
                self.form = choice
            self._has_result |= option == "--json"

    @contextmanager
    def results(self) -> Iterator[None]:
        with redirect_stdout(sys.stderr if self.form in DOCUMENTS and not self._has_result else sys.stdout):
            yield

    def find(self, finding: "Diagnostic", text: str | None = None) -> None:
        """Prints a finding, or collects it for the document at the end of the command.

        `text` is the line to print in the text format. None if the result of the command already shows the finding.
        """
        if self.form == "text":
            if text is not None:
                click.echo(text)
        elif not self._has_result:
            self._findings.append(finding)

    def fail(self, error: "Coded") -> None:
        from specc.compiler.errors import diagnostics_of, render

        if self.form == "text":
            click.echo(render(error, colored()), err=True)
        else:
            self._errors += diagnostics_of(error)

    def close(self, code: int, stream: TextIO | None = None) -> None:
        shown = sorted([*self._errors, *self._findings], key=lambda finding: (finding.file, finding.mark))
        if self.form == "text" or self.delegated or (not shown and (self._has_result or code or not _leads())):
            return
        if not shown and self.form == "json":  # in this most frequent case, nothing is imported
            click.echo("[]", file=stream)
            return
        from specc.compiler.errors.formats import FORMATS

        if text := FORMATS[self.form](shown):
            click.echo(text, file=stream)


def find_over_budget(path: Path, total: int, budget: int | None) -> bool:
    """Returns whether `total`, the size of a file or folder, exceeds its budget. In this case, also reports a
    finding.
    """
    over = budget is not None and total > budget
    if over:
        from specc.compiler.errors import Diagnostic

        message = f"{total:,} bytes exceed the budget of {budget:,} by {total - (budget or 0):,}"
        command_output().find(Diagnostic("F005", message, "", str(path)))
    return over


def _leads() -> bool:
    return os.environ.get("RANK", "0") == "0"


def command_output() -> Output:
    """Returns the output of the running command."""
    output = get_current_context().find_object(Output)
    return output if output is not None else Output()


def colored() -> bool:
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def tell(note: str) -> None:
    """Prints a note on stderr, unless the note is empty."""
    if note:
        click.echo(note, err=True)


def say(line: str) -> None:
    """Prints a line of progress on stderr."""
    click.echo(line, err=True)


class Stages:
    """Shows the progress of a long task.

    On a terminal, the progress is a percentage. Otherwise, the output has a line at the start of each stage, and
    another line every `every` seconds.
    """

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
