"""The `specc` command.

The module of a subcommand is imported when the subcommand runs. Errors become exit codes.
"""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from keyword import iskeyword
from types import FrameType
from typing import Any, NoReturn

import click
from click.exceptions import Exit, NoArgsIsHelpError

from specc.cli.help import HelpContext
from specc.cli.output import Output, format_option, keep_going

_TRAIN = ("torch", "triton", "sentencepiece", "tiktoken", "tokenizers")
_ONNX = ("onnx", "onnxscript", "onnxruntime")
EXTRAS = {**dict.fromkeys(_TRAIN, "train"), **dict.fromkeys(_ONNX, "onnx"), "flash_attn": "flash"}
EXIT_ENVIRONMENT, EXIT_BUG, EXIT_PREEMPTED, EXIT_INTERRUPTED = 3, 70, 75, 130


class LazyGroup(click.Group):
    """A group of commands. Each subcommand is the object `command` of a module. The module is imported when the
    subcommand runs.

    The group adds an option `--format` to each subcommand that does not define this option. The option selects the
    format of errors and findings.

    Args:
        name: the name of the group.
        package: the package that contains the modules. Each module has the name of its subcommand.
        entries: by name, the first sentence of the help of each subcommand, or a group. The help lists the subcommands
            in the order of `entries`.
        help: the help of the group.
    """

    context_class = HelpContext

    def __init__(self, name: str, package: str, entries: Mapping[str, str | click.Group], help: str) -> None:
        commands: dict[str, click.Command] = {
            key: click.Command(name=key, help=entry) if isinstance(entry, str) else entry
            for key, entry in entries.items()
        }
        settings = {"help_option_names": ["-h", "--help"]}
        super().__init__(name=name, commands=commands, help=help, context_settings=settings, params=[format_option])
        self.package = package

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, entry, rest = super().resolve_command(ctx, args)
        return name, entry and self.loaded(entry), rest

    def loaded(self, entry: click.Command) -> click.Command:
        if isinstance(entry, click.Group):
            return entry
        module = f"{entry.name}_" if iskeyword(entry.name or "") else entry.name
        command: click.Command = import_module(f"{self.package}.{module}").command
        command.context_class = HelpContext
        if not any("--format" in parameter.opts for parameter in command.params):
            command.params.append(format_option)
        return command


data = LazyGroup(
    "data",
    "specc.cli.data",
    {
        "pack": "Pack text, jsonl, parquet or folders of `datasets` into a folder of token shards.",
        "check": "Read a folder of token shards, and report its contents and problems.",
        "tokenizer": "Train a tokenizer on text: a byte-level BPE or a SentencePiece model.",
        "fetch": "Download token shards or a tokenizer from the Hugging Face hub.",
    },
    "Pack, check and download token shards, and train tokenizers.",
)


def _version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from importlib.metadata import version

        click.echo(f"specc, version {version('specc')}")
        ctx.exit()


specc = click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show the version and exit."
)(
    LazyGroup(
        "specc",
        "specc.cli",
        {
            "build": "Write the generated code of a spec.",
            "validate": "Check specs and report all errors at once.",
            "schema": "Print the JSON Schema of specs, for completion in editors.",
            "plan": "Summarize a spec: parameters, bytes, FLOPs, kernels and times.",
            "explain": "Explain an error code, or the kernel of each node of a spec.",
            "ir": "Print the graphs of a spec as text.",
            "render": "Print a spec with every value that applies, and the origin of each.",
            "diff": "Compare two specs and the code that is generated from them.",
            "breaking": "List the changes of specs that stop old checkpoints and artifacts from loading.",
            "init": "Copy a spec, with its comments, to a new name.",
            "migrate": "Rewrite specs of an old version in the current version.",
            "data": data,
            "train": "Train the model of a spec.",
            "sweep": "Train a spec with many settings and seeds, and compare the results.",
            "compare": "Compare groups of runs: means over seeds, Welch's test, curves and texts.",
            "eval": "Score a run or an artifact on the validation split, or on tasks that files define.",
            "generate": "Generate text with a run or an artifact, or transform lines.",
            "quantize": "Quantize the final weights of a run into an artifact, as its spec states.",
            "export": "Export a run as an artifact, safetensors, a graph, a folder of Transformers or a submission.",
            "import": "Turn a folder of Hugging Face Transformers into a spec and a run with its weights.",
            "size": "Count the bytes of an artifact or a submission exactly.",
            "report": "Write a report of a run: a self-contained HTML page, or a model card.",
            "inspect": "Measure the final weights of a run: ranks, heads, units, norms, experts, sensitivity.",
            "bench": "Time kernels, fused groups and the training step against eager Torch, torch.compile and cuBLAS.",
            "profile": "Record a trace of training steps, and list the kernels that take most of the time.",
            "tune": "Search for the fastest kernel and tile size of each node, at the sizes of the spec.",
            "doctor": "Check the machine: packages, GPUs, compilers, caches, disk and threads.",
            "completion": "Print the script that completes commands, options and files in a shell.",
            "verify": "Compare generated code with its plan and with float64 references.",
        },
        "Compile a model spec into Triton, CUTLASS and Torch code, and train, quantize, export and run the model.",
    )
)


def main() -> NoReturn:
    """The entry point of the program. It exits with the exit code of the command.

    The output contains a traceback only if the error is a bug in specc.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Torch's profiler writes to standard error
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # the search for plugins reads all installed packages
    gc.set_threshold(10_000)  # with the default of 700, garbage collection takes a fifth of the time of importing Torch
    keep_going()
    try:
        with pre_emptible():
            code = _flushed(run(sys.argv[1:], ignore_signals))
    except Terminated:  # the signal arrived while an error was being reported, or the output was being written
        code = EXIT_PREEMPTED
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    atexit.register(ignore_signals)  # runs before the handlers that Torch has registered
    if "torch" not in sys.modules:
        gc.freeze()  # skips the last garbage collection, which takes up to a tenth of the run time
    if (code and "RANK" in os.environ and "WORLD_SIZE" in os.environ) or code in (EXIT_PREEMPTED, EXIT_INTERRUPTED):
        # A failed process of a distributed run skips its teardown, in which CUDA or NCCL could wait for ranks that have
        # ended. A process that a signal ends also skips the teardown, which aborts if Torch is only partly imported.
        os._exit(code)
    sys.exit(code)


class Terminated(BaseException):
    """Raised when a signal arrives, unless the command has installed a handler for the signal."""

    exit_code = EXIT_PREEMPTED


@contextmanager
def pre_emptible() -> Iterator[None]:
    """A context manager in which SIGTERM and SIGHUP raise Terminated.

    The signal then ends a command with the exit code for preemption, even before the command installs its own signal
    handlers. Signals that the process already ignores, for example under nohup, stay ignored.
    """

    def end(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if _is_importing():  # C extensions turn an exception into another error, or drop it
            os.write(2, f"pre-empted by {name}\n".encode())
            os._exit(EXIT_PREEMPTED)
        raise Terminated(name)

    handled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in handled:
            if signal.getsignal(number) is end:
                signal.signal(number, signal.SIG_DFL)


def ignore_signals() -> None:
    """Makes the process ignore SIGTERM, SIGHUP and SIGINT until it ends. The work is then complete, and a signal during
    the teardown of Torch must not change the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _is_importing() -> bool:
    """Returns whether a module is being imported."""
    specs = (getattr(module, "__spec__", None) for module in list(sys.modules.values()))
    return any(getattr(spec, "_initializing", False) for spec in specs)


def _flushed(code: int) -> int:
    try:
        sys.stdout.flush()
    except OSError as error:
        # Otherwise, the interpreter would write the remaining output again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or _not_written(error)
    return code


def _not_written(error: OSError) -> int:
    from specc.compiler.errors import DiskProblem

    # In every format, the error is text on standard error, because a document cannot be written either
    Output().fail(DiskProblem(f"standard output cannot be written: {error.strerror}"))
    return EXIT_ENVIRONMENT


def run(arguments: Sequence[str], complete: Callable[[], None] = lambda: None) -> int:
    """Runs the command with the command-line arguments `arguments`, and returns its exit code. The command may
    call `complete` when its work is complete, before it prints its result."""
    output, stream = Output(arguments, complete), sys.stdout
    with output.results():
        code, shown = _run(arguments, output)
    if shown:
        try:
            output.close(code, stream)
        except OSError as error:
            failure = _not_written(error)
            return code if code in (EXIT_PREEMPTED, EXIT_INTERRUPTED) else failure
    return code


def _run(arguments: Sequence[str], output: Output) -> tuple[int, bool]:
    try:
        result = specc.main([*arguments], prog_name="specc", obj=output, standalone_mode=False)
        return (result if isinstance(result, int) else 0), True
    except Exit as end:
        return int(end.exit_code), False
    # Click raises SystemExit if the pipe of standard output is closed
    except SystemExit as end:
        left = isinstance(end.__context__, BrokenPipeError)
        return (end.code if isinstance(end.code, int) and not left else 0), False
    except NoArgsIsHelpError as error:
        click.echo(error.message, color=True)
        return int(error.exit_code), False
    except click.ClickException as error:
        _misused(error, output)
        return int(error.exit_code), True
    except (KeyboardInterrupt, click.Abort) as error:
        if isinstance(error.__cause__, EOFError):  # click turns every EOFError of a command into Abort
            return failed(error.__cause__, output), True
        return _ended("P002", "interrupted", EXIT_INTERRUPTED, output), True
    except Terminated as end:
        return _ended("P001", f"pre-empted by {end}", EXIT_PREEMPTED, output), True
    except BrokenPipeError:  # the reader of the output closed the pipe
        return 0, False
    except Exception as error:
        return failed(error, output), True


def _misused(error: click.ClickException, output: Output) -> None:
    if output.form == "text":
        error.show()
        return
    from specc.compiler.errors import UsageProblem

    context = getattr(error, "ctx", None)
    hint = f"{context.command_path if context is not None else 'specc'} --help"
    output.fail(UsageProblem(error.format_message(), hint))


def _ended(code: str, message: str, exit_code: int, output: Output) -> int:
    if output.form == "text":
        click.echo(message, err=True)
    else:
        from specc.compiler.errors import Ended

        output.fail(Ended(code, message))
    return exit_code


def failed(error: Exception, output: Output) -> int:
    """Shows an error that the user can fix, or reports a bug in specc. Returns the exit code."""
    if (problem := _problem(error)) is not None:
        output.fail(problem)
        return int(problem.exit_code)
    import traceback

    from specc.compiler.errors import Bug

    traceback.print_exception(error)
    if output.form == "text":
        click.echo(f"{Bug.code} {Bug.MESSAGE}", err=True)
    else:
        output.fail(Bug(error))
    return EXIT_BUG


def _problem(error: Exception) -> Any:
    """Returns an error with a message and a hint for the user, or None if `error` is a bug in specc."""
    from specc.compiler.errors import FULL, DiskProblem, MissingPackage

    if getattr(error, "exit_code", None) is not None:
        return error
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        # a full or read-only disk is not a bug in specc
        return DiskProblem(f"{error.filename}: {error.strerror}", "free some space" if error.errno in FULL else "")
    if isinstance(error, OSError) and error.errno in FULL:
        return DiskProblem(f"standard output cannot be written: {error.strerror}")
    if isinstance(error, ModuleNotFoundError) and type(error).__name__ == "PackageNotFoundError":
        message = f"{error.name} is not installed, so its version is unknown"
        return MissingPackage(message, "in the folder of its pyproject.toml: pip install -e .")
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRAS.get((error.name or "").partition(".")[0])):
        message = str(error)
        if message.startswith("No module named"):
            message = f"{error.name} is not installed"
        return MissingPackage(message, f"pip install 'specc[{extra}]'")
    return None
