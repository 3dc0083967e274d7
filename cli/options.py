"""Arguments, options and command classes that several commands share, and functions that read their values."""

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
SPECS = Path("specs")


class StatedPath(click.Path):
    """A path that is not empty. An empty path, for example of a variable that is not set, would be the working
    folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


class FiniteRange(click.FloatRange):
    """A range of numbers, without NaN, for which no comparison is true, and without infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


folder = StatedPath()


def _present(ctx: click.Context, parameter: click.Parameter, path: Path) -> Path:
    if path.exists() or ctx.resilient_parsing:
        return path
    from specc.compiler.errors import SpeccError

    if parameter.name == "run":
        raise SpeccError(f"{path}: no such run", "name a directory that `specc train` made")
    raise SpeccError(f"{path}: no such run or artifact", "name a run directory or a .specc file")


def stated(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Returns the value of an option. Raises BadParameter if the value is empty, for example because a variable in a
    script is not set.
    """
    if value is not None and not value.strip():
        raise click.BadParameter("the value is empty", ctx, parameter)
    return value


class Compiling(click.Command):
    """A command that compiles and exits. Garbage collection is disabled, because it would take a quarter of the run
    time.
    """

    def invoke(self, ctx: click.Context) -> Any:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return super().invoke(ctx)
        finally:
            gc.freeze()  # excludes these objects from the collection at the end of the process
            if enabled:
                gc.enable()


class SpecPath(StatedPath):
    """The path of a spec; `-` is standard input."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-":
            from specc.compiler.text.source import STDIN

            return STDIN
        return super().convert(value, param, ctx)


spec_argument = click.argument("spec", type=folder)
target_option = click.option("--target", help="A target of the spec. By default, all targets.")
device_option = click.option(
    "--target", help="A target of the spec. By default, the best target that this machine can run."
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


def number_option(*names: str, help: str, least: int = 1, most: int | None = None, **settings: Any) -> Callable[[F], F]:
    """Returns an option whose value is a whole number from `least` to `most`. The help shows the default value."""
    shown = "default" in settings
    return click.option(*names, type=click.IntRange(least, most), show_default=shown, help=help, **settings)


def picture_option(text: str) -> Callable[[F], F]:
    """Returns the option `--picture` with the help `text`."""
    path = click.Path(dir_okay=False, writable=True, path_type=Path)

    def is_png(_: click.Context, __: click.Parameter, value: Path | None) -> Path | None:
        if value is not None and value.suffix != ".png":  # a picture replaces an older one, but no other file
            raise click.BadParameter(f"{value} is not the name of a picture: use a name that ends in .png")
        return value

    return click.option("--picture", type=path, callback=is_png, metavar="FILE.png", help=f"{text} Needs matplotlib.")


def tokenizer_of(name: str, search: tuple[Path, ...]) -> tuple[Any, tuple[Path, ...]]:
    """Returns the arguments of `open_tokenizer`: the tokenizer that `--tokenizer` names, and the folders to search.

    If the option names a spec, the result is the tokenizer of the spec, and the folders include the folder of the spec.
    """
    from specc.compiler.errors import SpeccError
    from specc.compiler.spec.check import load
    from specc.compiler.spec.data.text import TextData

    if not name.endswith((".yaml", ".yml")):
        return name, search
    data = load(Path(name))[0].train.data
    if not isinstance(data, TextData):
        raise SpeccError(f"{name}: the spec has a vocabulary of characters, not a tokenizer", "name another spec")
    return data, (*search, Path(name).parent)


def with_data(extra: tuple[Path, ...], data: str | None) -> tuple[Path, ...]:
    """Returns the folders to search for tokenizer files: the folders in `extra`, and the folder that `data` names."""
    return (*extra, Path(data)) if data is not None and Path(data).is_dir() else extra


def all_specs() -> list[Path]:
    specs = sorted(SPECS.glob("*.yaml"))
    if not specs:
        raise click.UsageError(f"there are no specs in {SPECS}/ here")
    return specs


def generated_beside(spec: Path) -> Path:
    """Returns the path of the folder `generated`. If the spec is in a folder specs/, `generated` is beside specs/.
    Otherwise, `generated` is beside the spec.
    """
    folder = spec.parent
    if (folder.name or folder.absolute().name) == "specs":
        folder = folder.parent if folder.name else Path("..")
    return folder / "generated"


def only_spec() -> Path:
    """Returns the only spec in specs/. If there are several specs, raises UsageError with their names."""
    specs = all_specs()
    if len(specs) > 1:
        raise click.UsageError(f"name a spec: {', '.join(map(str, specs))}")
    return specs[0]


def checked_targets(spec: Path, target: str | None) -> tuple[str, ...]:
    """Returns a tuple with the target that the option `--target` selects. The tuple is empty if the option is missing.

    Raises UsageError if the spec does not list the target.
    """
    if target is None:
        return ()
    from specc.compiler.spec.check import load

    known = load(spec)[0].targets
    if target not in known:
        raise click.UsageError(f"{spec} does not list the target {target}; its targets are {', '.join(known)}")
    return (target,)
