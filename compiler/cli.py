"""The command line. Each command imports what it needs when it runs, so that `specc --help` is quick."""

import shlex
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import rich_click as click
from click.exceptions import Exit

F = TypeVar("F", bound=Callable[..., Any])
SPECS, GENERATED = Path("specs"), Path("generated")
EXTRAS = {"torch": "train", "triton": "train", "sentencepiece": "train", "tiktoken": "train", "flash_attn": "flash"}
EXIT_ENVIRONMENT, EXIT_BUG, EXIT_INTERRUPTED = 3, 70, 130

click.rich_click.STYLE_HELPTEXT = ""
spec_argument = click.argument("spec", type=click.Path(path_type=Path))
target_option = click.option("--target", help="One target; all of the spec's where unset.")
device_option = click.option("--target", help="One of the spec's targets; the one that suits this machine where unset.")
format_option = click.option(
    "--format", "form", type=click.Choice(["text", "json", "github"]), default="text", help="How errors are shown."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Override one field of the spec."
)


class _Group(click.RichGroup):
    """Lists commands in the order they are used in."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="specc")
def cli() -> None:
    """Compiles a model spec into Triton, CUTLASS and Torch code; trains, quantizes, exports and runs the model."""


def main() -> NoReturn:
    """The entry point: every failure ends with its exit code and without a traceback, unless it is a bug of specc."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs one command; returns its exit code."""
    from specc.compiler import cli_data, cli_export, cli_measure, cli_run  # they add their commands

    assert cli_run and cli_export and cli_measure and cli_data
    try:
        result = cli.main(arguments, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except Exit as done:
        return int(done.exit_code)
    except SystemExit as done:  # rich-click, after help that was not asked for
        return done.code if isinstance(done.code, int) else 0
    except click.ClickException as error:
        error.show()
        return int(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> int:
    """Shows an error that is meant for people, or reports a bug."""
    code = getattr(error, "exit_code", None)
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        click.echo(f"error: {error.filename}: {error.strerror}", err=True)  # a full or sealed disk is no bug
        return EXIT_ENVIRONMENT
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRAS.get((error.name or "").partition(".")[0])):
        what = f"{error.name} is not installed" if extra == "train" else str(error)
        click.echo(f"error: {what}\n  = help: pip install 'specc[{extra}]'", err=True)
        return EXIT_ENVIRONMENT
    if code is None:
        import traceback

        traceback.print_exception(error)
        click.echo("this is a bug in specc; please report it with the spec and the command", err=True)
        return EXIT_BUG
    form = "text"
    context = click.get_current_context(silent=True)
    if context is not None:
        form = context.params.get("form", "text")
    show(error, form)
    return int(code)


def show(error: Exception, form: str = "text") -> None:
    """An error as text on stderr, or as JSON or GitHub annotations on stdout."""
    from specc.compiler.errors import SpeccError, render

    if isinstance(error, SpeccError):
        click.echo(render(error, form, color=sys.stderr.isatty()), err=form == "text")  # type: ignore[arg-type]
        return
    message, hint = getattr(error, "message", str(error)), getattr(error, "hint", "")
    if form == "json":
        import json

        click.echo(json.dumps([{"message": message, "hint": hint}]))
    else:
        click.echo(f"error: {message}" + (f"\n  = help: {hint}" if hint else ""), err=True)


def tell(note: str) -> None:
    """A note on stderr, where there is one."""
    if note:
        click.echo(note, err=True)


def formatted(command: F) -> F:
    """Shows the errors of a command in the format that its `--format` asks for."""

    @wraps(command)
    def inner(*args: Any, form: str, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except Exception as error:
            if getattr(error, "exit_code", None) is None:
                raise
            show(error, form)
            return int(error.exit_code)  # type: ignore[attr-defined]

    return inner  # type: ignore[return-value]


def _all_specs() -> list[Path]:
    found = sorted(SPECS.glob("*.yaml"))
    if not found:
        raise click.UsageError(f"there are no specs in {SPECS}/ here")
    return found


def only_spec() -> Path:
    """The one spec in specs/, for commands that may go without. Raises UsageError that lists the choices."""
    found = _all_specs()
    if len(found) > 1:
        raise click.UsageError(f"name a spec: {', '.join(map(str, found))}")
    return found[0]


@cli.command()
@click.argument("specs", nargs=-1, type=click.Path(path_type=Path))
@click.option("--all", "every", is_flag=True, help="Every spec in specs/.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 and name each file that is not as built.")
@click.option("--diff", is_flag=True, help="Write nothing; print what a build would change.")
@click.option("--force", is_flag=True, help="Overwrite files that were edited by hand.")
@click.option("--into", type=click.Path(path_type=Path), default=GENERATED, help="Folder of generated code.")
@format_option
@formatted
def build(specs: tuple[Path, ...], every: bool, check: bool, diff: bool, force: bool, into: Path) -> int:
    """Write the generated code of a spec."""
    from specc.compiler.build import compile_spec
    from specc.compiler.generated_folder import drift, unified, write

    chosen = _all_specs() if every else list(specs) or [only_spec()]
    made = {path: compile_spec(path) for path in chosen}
    owners: dict[str, Path] = {}
    for path, built in made.items():
        if (first := owners.setdefault(built.spec.name, path)) != path:
            raise click.UsageError(f"{first} and {path} are both named {built.spec.name}")
    found = 0
    for path, built in made.items():
        tell(built.lock_use.note(path))
        folder = into / built.spec.name
        if diff:
            text = unified(folder, built.files, built.spec.name)
            found += bool(text)
            click.echo(text, nl=False)
        elif check:
            for entry in drift(folder, built.files):
                found += 1
                what = " (no build made it; delete it)" if entry.state == "extra" else ""
                click.echo(f"{folder / entry.path}: {entry.state}{what}")
        else:
            changes = write(folder, built.files, force)
            for state, name in changes:
                click.echo(f"{state:<8} {folder / name}")
            click.echo(
                f"{folder}: {len(built.files)} files, {len(changes)} written" if changes else f"{folder}: up to date"
            )
    if check and every:
        for folder in sorted(path for path in into.glob("*") if path.is_dir() and path.name not in owners):
            found += 1
            click.echo(f"{folder}: extra")
    if check and not found:
        click.echo(f"{len(chosen)} spec{'s' if len(chosen) > 1 else ''}: as built")
    return 1 if found else 0


@cli.command()
@click.argument("specs", nargs=-1, required=True, type=click.Path(path_type=Path))
@set_option
@format_option
def validate(specs: tuple[Path, ...], overrides: tuple[str, ...], form: str) -> int:
    """Check specs as far as a build does, and show all errors at once."""
    from specc.compiler.build import validate as check_spec
    from specc.compiler.errors import SpeccError, SpecError

    errors: list[SpeccError] = []
    for path in specs:
        try:
            check_spec(path, overrides)
        except SpeccError as error:
            errors.append(error)
        else:
            if form == "text":
                click.echo(f"{path}: ok")
    placed = [bad for bad in errors if isinstance(bad, SpecError)]
    for other in errors:
        if other not in placed:
            show(other, form)
    if placed:
        texts = {name: text for bad in placed for name, text in bad.texts.items()}
        show(SpecError([d for bad in placed for d in bad.diagnostics], texts), form)
    elif form == "json" and not errors:
        click.echo("[]")
    return 2 if errors else 0


@cli.command()
@click.option("--write", is_flag=True, help="Write specs/schema.json instead of printing.")
@click.option("--check", is_flag=True, help="Exit 1 where specs/schema.json is stale.")
def schema(write: bool, check: bool) -> int:
    """Print the JSON Schema of a spec, for editors."""
    from specc.compiler.generated_folder import replace_file
    from specc.compiler.spec.json_schema import schema_text

    text, path = schema_text(), SPECS / "schema.json"
    if write:
        replace_file(path, text)
        click.echo(f"wrote {path}")
    elif check:
        stale = not path.is_file() or path.read_bytes() != text.encode()
        click.echo(f"{path}: {'stale; run specc schema --write' if stale else 'as generated'}")
        return int(stale)
    else:
        click.echo(text, nl=False)
    return 0


@cli.command()
@spec_argument
@set_option
@json_option
@format_option
@formatted
def plan(spec: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Summarize what a spec makes: parameters, bytes, FLOPs, kernels."""
    from specc.compiler.build import compile_spec
    from specc.compiler.report.page import summary, summary_data

    built = compile_spec(spec, overrides)
    if as_json:
        import json

        data = {**summary_data(built.spec, built.plans, built.deployed), "idle_lock_entries": list(built.lock_use.idle)}
        click.echo(json.dumps(data, indent=2))
    else:
        tell(built.lock_use.note(spec))
        click.echo("\n".join(summary(built.spec, built.plans, built.deployed)))


@cli.command()
@spec_argument
@click.argument("node", required=False)
@target_option
@json_option
@format_option
@formatted
def explain(spec: Path, node: str | None, target: str | None, as_json: bool) -> None:
    """Show the kernel of each node, or of one, and why each other kernel was not chosen."""
    from specc.compiler.build import DEPLOYED, compile_spec
    from specc.compiler.report.explain import explain as explained
    from specc.compiler.report.explain import text_of

    built = compile_spec(spec, (), checked_targets(spec, target))
    plans = {**built.plans, **{f"{name}/{DEPLOYED}": plan for name, plan in built.deployed.items()}}
    rows = [row for folder, plan in plans.items() for row in explained(plan, node, folder)]
    if not rows and node is not None:
        raise click.UsageError(
            f"no node of {built.spec.name} is named {node}; `specc ir {shlex.quote(str(spec))}` lists them"
        )
    if as_json:
        import json

        click.echo(json.dumps([row.data() for row in rows], indent=2))
    else:
        told = [text_of(row) for row in rows]
        if node is None and (bare := [folder for folder, plan in plans.items() if not plan.choices]):
            name = built.spec.name
            told.append(f"{name} has no kernels of its own on {', '.join(bare)}: Torch and its compiler take all nodes")
        click.echo("\n\n".join(told))


def checked_targets(spec: Path, target: str | None) -> tuple[str, ...]:
    """The targets that an option asks for. Raises UsageError where the spec does not list it."""
    if target is None:
        return ()
    from specc.compiler.spec.check import load

    known = load(spec)[0].targets
    if target not in known:
        raise click.UsageError(f"{spec} is not built for {target}; its targets are {', '.join(known)}")
    return (target,)


@cli.command()
@spec_argument
@click.option("--after", default="fuse", show_default=True, help="The pass to stop after: lower, assign_quant or fuse.")
@click.option("--program", help="One program, e.g. train; all where unset.")
@target_option
@format_option
@formatted
def ir(spec: Path, after: str, program: str | None, target: str | None) -> None:
    """Print the graphs of a spec as text."""
    from specc.compiler.errors import SpecError
    from specc.compiler.pipeline import PIPELINE, run
    from specc.compiler.programs.programs import LoweringError
    from specc.compiler.report.explain import graphs_text
    from specc.compiler.spec.check import load, to_diagnostics

    passes = ["lower", *(name for name, _ in PIPELINE)]
    if after not in passes:
        raise click.UsageError(f"no pass is named {after}; the passes are {', '.join(passes)}")
    loaded, source = load(spec)
    chosen = checked_targets(spec, target) or loaded.targets
    try:
        programs = run(loaded, chosen[0], after)
    except LoweringError as error:
        raise SpecError(to_diagnostics(error.problems, source), source.texts) from None
    if program is not None and program not in [graph.name for graph in programs.graphs]:
        raise click.UsageError(f"no graph is named {program}; there are {', '.join(g.name for g in programs.graphs)}")
    click.echo(graphs_text(programs, program))


@cli.command("diff")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@format_option
@formatted
def compare(before: Path, after: Path) -> int:
    """Compare two specs: a summary, then the specs, the plans and the kernels, paired by node."""
    from specc.compiler.diff import compare as compared

    summary, text = compared(before, after)
    click.echo("\n".join(summary))
    if text:
        click.echo(f"\n{text}", nl=False)
    return 1 if text else 0


@cli.command()
@click.argument("name")
@click.option("--from", "origin", type=click.Path(path_type=Path), required=True, help="The spec to start from.")
@format_option
@formatted
def init(name: str, origin: Path) -> None:
    """Start a new spec from another one, comments and all."""
    from specc.compiler.spec.init import copied

    path = origin if origin.suffix == ".yaml" else SPECS / f"{origin}.yaml"
    target = SPECS / f"{name}.yaml"
    copied(path, target, name)
    click.echo(f"wrote {target}; next: specc plan {shlex.quote(str(target))}")
