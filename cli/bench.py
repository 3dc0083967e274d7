"""The `bench` command. It imports Torch only when it runs."""

import json
import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from specc.cli.options import device_option, json_option, number_option, picture_option, set_option, spec_argument
from specc.cli.output import say
from specc.cli.processes import Repeatable, given_arguments, joined_world, launched

PARTS = ("kernels", "groups", "step", "optimizer", "table", "decode", "int8")


@click.command("bench", cls=Repeatable)
@spec_argument
@device_option
@set_option
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(PARTS),
    help="Part to run. Repeatable. By default, all parts of the spec.",
)
@click.option(
    "--at", default="", metavar="TEXT", help="Measure only kernels, groups and int8 products whose path contains TEXT."
)
@number_option(
    "--steps",
    default=10,
    help="Number of training steps per measurement, for `step`, `optimizer` and each row of `table`.",
)
@number_option("--gpus", help="Number of processes for the distributed rows of `table`. Each process uses one GPU.")
@click.option(
    "--weights",
    type=click.Path(exists=True, path_type=Path),
    metavar="RUN|ARTIFACT",
    help="Weights for `decode`. By default, initial weights, with which decoded lines are long.",
)
@number_option(
    "--batch",
    "batches",
    multiple=True,
    help="Number of texts to `decode` at once. Repeatable. By default, 1, 8, 64 and 256; on a CPU, 1 and 8.",
)
@number_option(
    "--context",
    "contexts",
    multiple=True,
    help="Length of each text, in tokens, when `decode` ends. Repeatable. By default, 128, 512, 2048 and 8192, each "
    "at most the model's context; on a CPU, 128 and 512.",
)
@number_option(
    "--tokens",
    help="Number of tokens at the end of each text that `decode` times. By default, 64, but at most half of the "
    "model's context.",
)
@picture_option("Write a roofline picture.")
@json_option
def command(
    spec: Path,
    target: str | None,
    overrides: tuple[str, ...],
    only: tuple[str, ...],
    at: str,
    steps: int,
    gpus: int | None,
    weights: Path | None,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    tokens: int | None,
    picture: Path | None,
    as_json: bool,
) -> int:
    """Time kernels, fused groups and the training step against eager Torch, torch.compile and cuBLAS.

    Inputs have the sizes of a micro-batch of the spec. The floor of a kernel is its shortest possible time. The floor
    is computed from the bytes and operations of the kernel, and from the measured peak rates of the device. If a kernel
    computes wrong values, the command fails and does not time the kernel.

    The part `optimizer` times an update by all optimizers of the spec together, and by each optimizer separately. It
    also times Torch's AdamW in three forms: fused, with multi-tensor kernels, and in a loop over the parameters.

    The part `decode` measures the tokens per second of a text model with a contiguous cache and with a paged cache. It
    also measures Transformers, if this package is installed and has the model. The floor of a decoding step is the time
    for reading the weights and the cache once. On a GPU, steps with library matrix products are measured too. All steps
    are measured with and without torch.compile.

    A model that maps lines to lines has other parts. `table` times training and validation, on one GPU and on several
    GPUs, with and without a cache. `decode` measures lines per second in each dtype. `int8` compares the int8 matrix
    products of the quantized model with torch._int_mm.

    If SPEC is a report that --json wrote, the command measures nothing, and draws the picture of this report.
    """
    from specc.compiler.build import plan_spec
    from specc.runtime.distributed.launch import is_launched
    from specc.runtime.model.load import choose_target

    parts = tuple(part for part in PARTS if part in only)
    if picture is not None and parts and not {"kernels", "groups"} & {*parts}:
        raise click.UsageError("--picture draws kernels and groups; with --only, name at least one of these")
    given = {"--weights": weights, "--batch": batches or None, "--context": contexts or None, "--tokens": tokens}
    for option, value, part in (("--gpus", gpus, "table"), *((name, value, "decode") for name, value in given.items())):
        if value is not None and parts and part not in parts:
            raise click.UsageError(f"{option} applies only to {part}; add {part} to --only")
    if picture is not None and not picture.parent.is_dir():
        raise click.UsageError(f"there is no folder {picture.parent} for the picture")
    if spec.suffix == ".json":
        if picture is None:
            raise click.UsageError(f"{spec} is a report, not a spec; add --picture FILE to draw it")
        _draw(_read_report(spec), picture)
        return 0
    with joined_world() if is_launched() else nullcontext() as world:
        planned = plan_spec(spec, overrides)
        loaded, lock = planned.spec, planned.lock
        chosen = choose_target(loaded, target)  # independent of --gpus, so that results are comparable
        if (code := launched(gpus, loaded, chosen, world)) is not None:
            return code
        from specc.runtime.bench import report
        from specc.runtime.bench.suite import BenchOptions, follow
        from specc.runtime.bench.suite import bench as run

        if picture is not None:
            from specc.runtime.bench.roofline import require

            require()
        command = shlex.join(["specc", *given_arguments()])
        options = BenchOptions(loaded, lock, chosen, parts, steps, command, at, weights, batches, contexts, tokens)
        if world is not None and world.rank:
            follow(options, world)
            return 0
        results = run(options, say, world)
        click.echo(json.dumps(report.data(results), indent=2) if as_json else report.text(results))
        if picture is not None:
            _draw(report.data(results), picture)
    return 0


def _read_report(path: Path) -> dict[str, Any]:
    from specc.compiler.errors import SpeccError

    try:
        data = json.loads(path.read_bytes())
        drawable = bool(data["ceilings"] and (data["kernels"] or data["groups"]))
    except (ValueError, KeyError, TypeError, OSError):
        drawable = False
    if not drawable:
        raise SpeccError(f"{path}: not a report of kernels or groups", "write one with `specc bench SPEC --json`")
    return dict(data)


def _draw(data: Mapping[str, Any], picture: Path) -> None:
    from specc.runtime.bench.roofline import roofline
    from specc.runtime.storage.atomic import write_atomically

    write_atomically(picture, [roofline(data)])
    say(f"wrote {picture}")
