"""The `import` command, which turns a folder of Hugging Face Transformers into a spec and a run."""

from pathlib import Path

import click

from specc.cli.options import folder, stated
from specc.cli.output import say
from specc.compiler.text.shell import shell_path


@click.command("import")
@click.argument("source", metavar="FOLDER", type=folder)
@click.option("--name", callback=stated, help="Name of the spec. By default, the name of the folder.")
@click.option("--spec", type=folder, help="File of the spec. By default, specs/NAME.yaml.")
@click.option("--run", "directory", type=folder, help="Run directory. By default, the next free runs/NAME-NNN.")
@click.option(
    "--data", callback=stated, help="Data of the run, as for `specc train`. By default, the data of the spec."
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="PATH=VALUE",
    help="Override one field of the spec in the run, such as train.steps=200. Repeatable.",
)
@click.option(
    "--ignore",
    "ignored",
    multiple=True,
    metavar="FIELD",
    help="Field of config.json to ignore, because it does not change the outputs of the model. Repeatable.",
)
def command(
    source: Path,
    name: str | None,
    spec: Path | None,
    directory: Path | None,
    data: str | None,
    overrides: tuple[str, ...],
    ignored: tuple[str, ...],
) -> None:
    """Turn a folder of Hugging Face Transformers into a spec and a run with its weights.

    The folder contains config.json, safetensors and tokenizer files. The command runs no code of the folder, and
    downloads nothing.
    """
    from specc.runtime.families.config import require_folder

    require_folder(source)  # before Torch is imported, so that an error is shown at once
    from specc.runtime.hugging_face.importing import ImportOptions, import_folder

    options = ImportOptions(name, spec, directory, data, overrides, ignored)
    result = import_folder(source, options, say)
    if result.ignored:
        say(f"ignored, without effect on the outputs: {', '.join(result.ignored)}")
    click.echo(f"wrote {result.path}: {result.family.title}, {result.parameters:,} parameters")
    click.echo(f"wrote {result.run}: a run with these weights at step 0")
    run = shell_path(result.run)
    click.echo(f"next: specc generate {run} --prompt TEXT; specc train --run {run} --resume auto; specc quantize {run}")
