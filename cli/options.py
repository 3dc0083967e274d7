"""Arguments, options and classes that several commands share."""

import gc
from pathlib import Path
from typing import Any

import rich_click as click

from specc.cli.output import FORMATS

folder = click.Path(path_type=Path)


def _present(ctx: click.Context, parameter: click.Parameter, path: Path) -> Path:
    """Checks that a path exists before the command imports anything. Raises SpeccError if it does not."""
    if path.exists() or ctx.resilient_parsing:
        return path
    from specc.compiler.errors import SpeccError

    if parameter.name == "run":
        raise SpeccError(f"{path}: no such run", "name a directory that `specc train` made")
    raise SpeccError(f"{path}: no such run or artifact", "name a run directory or a .specc file")


def stated(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Rejects an empty text, which a script passes if its variable is not set. Raises BadParameter."""
    if value is not None and not value.strip():
        raise click.BadParameter("it is empty", ctx, parameter)
    return value


class Compiling(click.RichCommand):
    """A command that compiles and exits, without garbage collection: nearly all of its objects live until the end, and
    collection would take a quarter of its time."""

    def invoke(self, ctx: click.Context) -> Any:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return super().invoke(ctx)
        finally:
            gc.freeze()  # the collection at the end of the process skips these objects
            if enabled:
                gc.enable()


class SpecPath(click.Path):
    """The path of a spec; `-` is standard input."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, allow_dash=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-":
            from specc.compiler.text.source import STDIN

            return STDIN
        return super().convert(value, param, ctx)


spec_argument = click.argument("spec", type=click.Path(path_type=Path))
target_option = click.option("--target", help="A target of the spec. By default, all of them.")
device_option = click.option(
    "--target", help="A target of the spec. By default, the best one that this machine can run."
)
format_option = click.option(
    "--format", type=click.Choice(FORMATS), default=FORMATS[0], expose_value=False, help="Format of errors."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Override one field of the spec. Repeatable."
)
run_argument = click.argument("run", type=folder, callback=_present)
model_argument = click.argument("model", type=folder, metavar="RUN|ARTIFACT", callback=_present)
tokenizers_option = click.option(
    "--tokenizers", multiple=True, type=folder, help="Folder to search for the file of the tokenizer. Repeatable."
)


def with_data(extra: tuple[Path, ...], data: str | None) -> tuple[Path, ...]:
    """Returns the folders to search for tokenizer files: the given folders, and the folder of the data, which in packed
    data contains its tokenizer."""
    return (*extra, Path(data)) if data is not None and Path(data).is_dir() else extra
