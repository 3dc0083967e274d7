"""The commands that quantize, write what ships, and count its bytes."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import rich_click as click

from specc.compiler.cli import cli, device_option, format_option, formatted, json_option
from specc.compiler.cli_run import Stages, folder, model_argument, run_argument, say, tokenizers_option, with_data


@cli.command()
@run_argument
@click.option("--data", help="Calibrate and measure on this; the run's own data where unset.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Measure the loss on so many tokens only.")
@click.option(
    "--set", "overrides", multiple=True, metavar="quant.PATH=VALUE", help="Quantize otherwise than the run's spec says."
)
@click.option(
    "--for",
    "purpose",
    type=click.Choice(["artifact", "submission"]),
    default="artifact",
    show_default=True,
    help="What shall fit quant.budget_bytes: the artifact alone, or as a submission with its train_gpt.py.",
)
@device_option
@tokenizers_option
@json_option
@format_option
@formatted
def quantize(
    run: Path,
    data: str | None,
    max_tokens: int | None,
    overrides: tuple[str, ...],
    purpose: str,
    target: str | None,
    tokenizers: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Quantize the weights that a run ends with, as its spec says, into one artifact."""
    from specc.runtime.quantize.pipeline import QuantizeOptions
    from specc.runtime.quantize.pipeline import quantize as run_quantize
    from specc.runtime.quantize.report import input_table, solution_line, table

    places, code = with_data(tokenizers, data), 0
    if purpose == "submission":
        from specc.runtime.submission.export import code_bytes

        code = code_bytes(run, overrides, places)
    options = QuantizeOptions(data, max_tokens, target, None, places, overrides=overrides, reserved=code)
    result = run_quantize(run, options, say, Stages())
    if as_json:
        click.echo((result.artifact.parent / "report.json").read_text(encoding="utf-8"), nl=False)
        return
    for name, score in (("before", result.before), ("after", result.after)):
        for line in score.report():
            click.echo(f"{name:<12} {line}")
    if result.calibration is not None:
        told = ", ".join(f"{name} {value}" for name, value in result.calibration.items())
        click.echo(f"calibrated   {told.replace('_', ' ')}, in {result.seconds:.1f} s")
    if line := solution_line(result.rows):
        click.echo(f"solved       {line}")
    click.echo(table(result.rows))
    if result.inputs:
        click.echo(input_table(result.inputs))
    click.echo(f"promoted     {', '.join(result.promoted) or 'nothing'}")
    budget = f" of {result.budget:,}" if result.budget is not None else ""
    beside = f" and {code:,} of code" if code else ""
    click.echo(f"artifact     {result.size.total:,} bytes{beside}{budget}: {result.artifact}")
    click.echo(f"report       {result.artifact.parent / 'report.json'}: all of this, a row a parameter")
    wants = "--prompt TEXT" if result.spec.model.reads == "text" else "--lines FILE"
    click.echo(f"next: specc generate {shlex.quote(str(result.artifact))} {wants}")


@dataclass(frozen=True, slots=True)
class Wish:
    """What `specc export` was asked for; `codec` and `targets` are for a submission."""

    run: Path
    kind: Any
    out: Path | None
    force: bool
    codec: str | None
    targets: tuple[str, ...]
    tokenizers: tuple[Path, ...]


class Writer(Protocol):
    def __call__(self, wish: Wish) -> tuple[Sequence[Path], bool]:
        """The files that were written, and whether they are over a budget."""
        ...


def _one_file(wish: Wish) -> tuple[Sequence[Path], bool]:
    from specc.runtime.export.run import export as write

    if wish.codec is not None or wish.targets:
        raise click.UsageError("--codec and --target are for --format submission")
    return [write(wish.run, wish.kind, wish.out, force=wish.force, say=say)], False


def _submission(wish: Wish) -> tuple[Sequence[Path], bool]:
    from specc.runtime.artifact.codecs import Codec
    from specc.runtime.submission.export import export_submission
    from specc.runtime.submission.names import CODE, WEIGHTS

    size = export_submission(
        wish.run,
        wish.out or wish.run / "submission",
        codec=Codec[(wish.codec or "brotli").upper()],
        targets=wish.targets,
        search=wish.tokenizers,
        force=wish.force,
        say=say,
    )
    return [size.path / CODE, size.path / WEIGHTS], size.over


WRITERS: Mapping[str, Writer] = {"artifact": _one_file, "safetensors": _one_file, "submission": _submission}


@cli.command()
@run_argument
@click.option(
    "--format",
    "kind",
    type=click.Choice(list(WRITERS)),
    default="artifact",
    show_default=True,
    help="A submission is a folder: train_gpt.py, which needs no specc, and the weights.",
)
@click.option("--out", type=folder, help="The file, or of a submission the folder, to write; in the run where unset.")
@click.option("--force", is_flag=True, help="Replace a file that exists.")
@click.option("--codec", type=click.Choice(["brotli", "lzma"]), help="Of a submission's weights; brotli where unset.")
@click.option("--target", "targets", multiple=True, help="Of a submission, take the code of this one only; repeatable.")
@tokenizers_option
def export(
    run: Path,
    kind: Any,
    out: Path | None,
    force: bool,
    codec: str | None,
    targets: tuple[str, ...],
    tokenizers: tuple[Path, ...],
) -> int:
    """Write a run as one file, read back and compared before it counts; or as a submission to parameter-golf, with
    exit code 1 where that is over its budget."""
    paths, over = WRITERS[kind](Wish(run, kind, out, force, codec, targets, tokenizers))
    for path in paths:
        click.echo(f"wrote {path}: {path.stat().st_size:,} bytes")
    return int(over)


@cli.command()
@model_argument
@click.option("--budget", type=click.IntRange(min=1), help="Bytes it may take, decimal; the spec's where unset.")
@click.option(
    "--plain", is_flag=True, help="Compress the same arrays as parameter-golf PR 1105 does, too, and compare; minutes."
)
@json_option
@format_option
@formatted
def size(model: Path, budget: int | None, plain: bool, as_json: bool) -> int:
    """Count the bytes that ship, exactly; exit 1 when they are over the budget. Of a submission's folder, those of its
    two files."""
    from specc.runtime.submission.count import is_submission, submission_size

    more: dict[str, object] = {}
    if plain:
        from specc.runtime.submission.plain import plain_size

        compared = plain_size(model)
        more = {"own": compared.own, "plain": compared.plain}
        if not as_json:
            click.echo(compared.report())
    if is_submission(model):
        counted = submission_size(model, budget)
        for line in [json.dumps({**counted.facts(), **more}, indent=2)] if as_json else counted.report():
            click.echo(line)
        return int(counted.over)
    from specc.runtime.export.size import size as count

    found = count(model, budget, say)
    if as_json:
        groups = [
            {"name": g.name, "tensors": g.tensors, "parameters": g.parameters, "scheme": g.scheme, "stored": g.stored}
            for g in found.groups
        ]
        data = {
            "path": str(found.path),
            "total": found.total,
            "budget": found.budget,
            "over": found.over,
            "groups": groups,
            **more,
        }
        click.echo(json.dumps(data, indent=2))
        return int(found.over)
    for group in found.groups:
        click.echo(f"{group.name:<28} {group.tensors:>4} x {group.scheme:<22} {group.stored:>12,} bytes before brotli")
    for section in found.sections:
        click.echo(f"section {section.kind:<20} {section.compressed:>12,} bytes of {section.raw:,}")
    against = (
        f" of {found.budget:,}: {'OVER by' if found.over else 'within, by'} {abs(found.budget - found.total):,}"
        if found.budget
        else ""
    )
    click.echo(f"{found.path}: {found.total:,} bytes{against}")
    return int(found.over)
