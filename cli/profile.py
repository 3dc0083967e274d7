"""The `profile` command. It imports Torch only when it runs."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import click

from specc.cli.options import device_option, json_option, number_option, set_option, spec_argument
from specc.cli.output import say


@click.command("profile")
@spec_argument
@device_option
@set_option
@number_option("--steps", default=3, help="Number of training steps to record.")
@number_option("--top", default=20, help="Number of kernels to print.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.json.gz",
    help="File for the trace, which ui.perfetto.dev opens. By default, NAME.trace.json.gz in the working directory.",
)
@click.option("--force", is_flag=True, help="Replace an existing trace.")
@json_option
def command(
    spec: Path,
    target: str | None,
    overrides: tuple[str, ...],
    steps: int,
    top: int,
    out: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Record a trace of training steps, and list the kernels that take most of the time.

    The trainer runs the steps on random data. On a CPU, operators are listed instead of kernels. The time of an
    operator excludes the operators that it calls. A trace has at most 50 MB. A larger trace is reduced to the events of
    the GPU.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise, Torch's profiler prints messages to stderr
    from specc.compiler.build import plan_spec

    planned = plan_spec(spec, overrides)  # before Torch is imported, so that an error is shown at once
    from specc.runtime.bench.trace import record_trace

    out = out or Path(f"{planned.spec.name}.trace.json.gz")
    trace = record_trace(planned.spec, target, steps, out, lock=planned.lock, force=force, say=say)
    if as_json:
        click.echo(json.dumps({**asdict(trace), "path": str(trace.path)}, indent=2))
    else:
        click.echo("\n".join(trace.lines(top)))
