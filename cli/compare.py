"""The `compare` command, which compares groups of runs. Torch is imported only to run their models."""

import json
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specc.cli.options import device_option, json_option, number_option, picture_option, tokenizers_option
from specc.cli.output import Stages, say

if TYPE_CHECKING:
    from specc.runtime.compare.calibration import Calibration
    from specc.runtime.compare.groups import Group


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, metavar="[NAME=]RUNS...")
@picture_option("Write curves of the loss over tokens and over seconds, and the recorded evaluations, as a picture.")
@click.option(
    "--calibration",
    is_flag=True,
    help="Measure the expected calibration error of next-token probabilities on the validation split.",
)
@number_option("--max-tokens", metavar="N", default=65536, help="Number of validation tokens for --calibration.")
@click.option("--prompt", help="Also print the text that the first run of each group writes after this prompt.")
@number_option("--length", default=100, help="Maximum number of tokens of the texts of --prompt.")
@click.option(
    "--temperature", type=float, default=0.8, show_default=True, help="Sampling temperature of the texts of --prompt."
)
@number_option("--seed", default=0, least=0, help="Seed of the texts of --prompt.")
@device_option
@tokenizers_option
@json_option
def command(
    runs: tuple[str, ...],
    picture: Path | None,
    calibration: bool,
    max_tokens: int,
    prompt: str | None,
    length: int,
    temperature: float,
    seed: int,
    target: str | None,
    tokenizers: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Compare groups of runs: means over seeds, Welch's test, curves and texts.

    RUNS is a run, a pattern such as 'runs/base-*', the folder of a sweep, or a list of these, separated by commas. By
    default, runs that differ only in the seed form a group. NAME=RUNS puts all runs of RUNS into one group.

    For each pair of groups, the output shows Welch's t-test (t, degrees of freedom, two-sided p), and the settings that
    differ. The command fails if runs were scored on different data. Results that `specc eval` has recorded are shown as
    tables, with one row per group.
    """
    from specc.runtime.compare.comparison import compare
    from specc.runtime.compare.groups import groups_of
    from specc.runtime.compare.report import report

    if picture is not None:
        from specc.runtime.pictures import require_matplotlib

        require_matplotlib("the picture of a comparison")
        if not picture.parent.is_dir():
            raise click.UsageError(f"there is no folder {picture.parent} for the picture")
    comparison, groups = compare(groups_of(runs))
    if (calibration or prompt is not None) and any(g.first.run.spec.model.reads == "lines" for g in groups):
        raise click.UsageError("--calibration and --prompt are for text models")
    calibrations = _calibrations(groups, max_tokens, target, tokenizers) if calibration else {}
    texts = _texts(groups, prompt, length, temperature, seed, target, tokenizers) if prompt is not None else {}
    if as_json:
        facts = comparison.facts()
        facts |= {"calibration": {name: [each.facts() for each in members] for name, members in calibrations.items()}}
        click.echo(json.dumps({**facts, "texts": texts}, indent=2, ensure_ascii=False))
    else:
        lines = [*report(comparison), *_calibration_lines(calibrations)]
        for name, text in texts.items():
            lines += ["", f"--- {name}, seed {seed}, temperature {temperature:g}", f"{prompt}{text}"]
        click.echo("\n".join(lines))
    if picture is not None:
        from specc.runtime.compare.picture import comparison_picture
        from specc.runtime.storage.atomic import write_atomically

        write_atomically(picture, [comparison_picture(groups, calibrations, comparison.evaluations)])
        say(f"wrote {picture}")


def _calibrations(
    groups: "Sequence[Group]", max_tokens: int, target: str | None, tokenizers: tuple[Path, ...]
) -> "dict[str, list[Calibration]]":
    from specc.runtime.compare.calibration import calibration_of
    from specc.runtime.open_model import open_model

    results: dict[str, list[Calibration]] = {}
    for group in groups:
        for member in group.members:
            opened = open_model(member.run.directory, target, search=tokenizers, say=say)
            calibration = calibration_of(opened, max_tokens, partial(Stages(), member.name))
            results.setdefault(group.name, []).append(calibration)
    return results


def _calibration_lines(calibrations: "dict[str, list[Calibration]]") -> list[str]:
    if not calibrations:
        return []
    lines = ["", "expected calibration error of the most probable token, 15 bins of equal width"]
    for name, results in calibrations.items():
        errors = [100 * result.ece for result in results]
        spread = f" ± {statistics.stdev(errors):.2f}" if len(errors) > 1 else ""
        accuracy, confidence = (
            100 * statistics.fmean(getattr(result, value) for result in results) for value in ("accuracy", "confidence")
        )
        lines.append(
            f"  {name}: {statistics.fmean(errors):.2f}{spread} %, accuracy {accuracy:.2f} %, mean probability "
            f"{confidence:.2f} %, on {results[0].tokens:,} tokens"
        )
    return lines


def _texts(
    groups: "Sequence[Group]",
    prompt: str,
    length: int,
    temperature: float,
    seed: int,
    target: str | None,
    tokenizers: tuple[Path, ...],
) -> dict[str, str]:
    from specc.runtime.decode.sampling import Sampling
    from specc.runtime.generate import generate
    from specc.runtime.open_model import open_model

    texts: dict[str, Any] = {}
    for group in groups:
        opened = open_model(group.first.run.directory, target, search=tokenizers, say=say)
        text = generate(opened, prompt, length, Sampling(temperature), seed, say=say)
        texts[group.name] = text.decode(errors="replace")
    return texts
