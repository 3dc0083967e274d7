"""Arguments and options that several commands share."""

from pathlib import Path

import rich_click as click

from specc.cli.output import FORMATS

folder = click.Path(path_type=Path)

spec_argument = click.argument("spec", type=click.Path(path_type=Path))
target_option = click.option("--target", help="One target; all of the spec's where unset.")
device_option = click.option("--target", help="One of the spec's targets; the one that suits this machine where unset.")
format_option = click.option(
    "--format", type=click.Choice(FORMATS), default=FORMATS[0], expose_value=False, help="How errors are shown."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Override one field of the spec."
)
run_argument = click.argument("run", type=folder)
model_argument = click.argument("model", type=folder, metavar="RUN|ARTIFACT")
tokenizers_option = click.option(
    "--tokenizers", multiple=True, type=folder, help="A folder to look for the tokenizer's file in; may be repeated."
)


def with_data(extra: tuple[Path, ...], data: str | None) -> tuple[Path, ...]:
    """Where tokenizer files are looked for: what was named, and the folder of the data, where packed data has its."""
    return (*extra, Path(data)) if data is not None and Path(data).is_dir() else extra
