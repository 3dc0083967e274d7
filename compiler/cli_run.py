"""The commands that run a model. Torch is imported when one of them runs, not before."""

import json
import sys
from pathlib import Path
from typing import Any

import rich_click as click

from specc.compiler.cli import (
    checked_targets,
    cli,
    format_option,
    formatted,
    json_option,
    only_spec,
    set_option,
    spec_argument,
    target_option,
)

folder = click.Path(path_type=Path)
data_option = click.option("--data", help="A text, jsonl or token-shard file or folder, or `stdlib`.")
tokenizers_option = click.option(
    "--tokenizers", multiple=True, type=folder, help="A folder to look for the tokenizer's file in; may be repeated."
)


def say(line: str) -> None:
    """Progress goes to stderr, results to stdout."""
    click.echo(line, err=True)


def search(spec: Path | None, extra: tuple[Path, ...]) -> tuple[Path, ...]:
    """Where tokenizer files are looked for: what was named, beside the spec, here."""
    beside = (spec.parent,) if spec is not None else ()
    return (*extra, *beside, Path())


@cli.command()
@click.argument("spec", required=False, type=folder)
@click.option("--run", "directory", type=folder, help="Run directory; runs/NAME-NNN where unset, and printed.")
@click.option("--data", default="stdlib", show_default=True, help="A text, jsonl or token-shard file or folder, or `stdlib`.")
@target_option
@set_option
@click.option("--resume", type=click.Choice(["auto"]), help="Go on from the newest sound checkpoint.")
@click.option("--steps", type=click.IntRange(min=0), help="End this run early; the schedule does not change.")
@click.option("--max-seconds", type=click.FloatRange(min=0), help="End this run early, after so many seconds.")
@tokenizers_option
@format_option
@formatted
def train(
    spec: Path | None,
    directory: Path | None,
    data: str,
    target: str | None,
    overrides: tuple[str, ...],
    resume: Any,
    steps: int | None,
    max_seconds: float | None,
    tokenizers: tuple[Path, ...],
) -> None:
    """Train a spec."""
    from specc.compiler.build import compile_loaded
    from specc.compiler.check import load

    path = spec or only_spec()
    loaded, source = load(path, overrides)
    compile_loaded(loaded, source)
    from specc.runtime.load import choose_target
    from specc.runtime.train import TrainOptions
    from specc.runtime.train import train as run

    options = TrainOptions(
        loaded,
        choose_target(loaded, target),
        data,
        directory,
        overrides,
        resume,
        steps,
        max_seconds,
        search(path, tokenizers),
    )
    result = run(options, say)
    ended = "complete" if result.complete else "ended early"
    click.echo(f"{result.step} steps in {result.seconds:.1f} s, {ended}: {result.final.bpb_pieces:.4f} bits per byte")
    click.echo(f"next: specc quantize {result.run}")


@cli.command()
@spec_argument
@target_option
@json_option
@format_option
@formatted
def verify(spec: Path, target: str | None, as_json: bool) -> int:
    """Hold the generated code to the plan (torch.fx) and to float64 references; look for leaks."""
    from specc.compiler.build import compile_spec

    wanted = checked_targets(spec, target)
    built = compile_spec(spec, (), wanted)
    from specc.runtime.verify import verify as checks

    found = []
    words = {True: "ok", False: "FAILED", None: "not here"}
    for check in checks(built.spec, wanted or built.spec.targets):
        found.append(check)
        if not as_json:
            click.echo(f"{check.target:<6} {words[check.ok]:<8} {check.name}: {check.detail}")
    if as_json:
        rows = [{"target": c.target, "name": c.name, "ok": c.ok, "detail": c.detail} for c in found]
        click.echo(json.dumps(rows, indent=2))
    return int(any(check.ok is False for check in found))


__all__ = ["data_option", "sys"]
