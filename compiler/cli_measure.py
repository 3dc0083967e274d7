"""The commands that measure. Torch is imported when one of them runs, not before."""

import json
import shlex
from pathlib import Path

import rich_click as click

from specc.compiler.cli import cli, format_option, formatted, json_option, set_option, spec_argument, target_option
from specc.compiler.cli_run import say

PARTS = ("kernels", "groups", "step")


@cli.command()
@spec_argument
@target_option
@set_option
@click.option("--only", multiple=True, type=click.Choice(PARTS), help="One part; may be repeated. All where unset.")
@click.option("--at", default="", metavar="TEXT", help="Of kernels and groups, those whose path contains TEXT.")
@click.option(
    "--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Training steps to time, of each build."
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE.png",
    help="Write a roofline picture.",
)
@json_option
@format_option
@formatted
def bench(
    spec: Path,
    target: str | None,
    overrides: tuple[str, ...],
    only: tuple[str, ...],
    at: str,
    steps: int,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Time every kernel, every fused group and the training step beside eager Torch, torch.compile and cuBLAS.

    Sizes are the spec's own: a micro-batch of whole windows. Floors are what bytes and operations cost at ceilings
    that are measured in the same run. A kernel with wrong values is an error and gets no time.
    """
    from specc.compiler.build import compile_loaded
    from specc.compiler.check import load
    from specc.compiler.lock import lock_path, read_lock

    parts = tuple(part for part in PARTS if part in only) or PARTS
    if picture is not None and parts == ("step",):
        raise click.UsageError("--picture shows kernels and groups; the step alone has neither")
    if picture is not None and not picture.parent.is_dir():
        raise click.UsageError(f"there is no folder {picture.parent} for the picture")
    loaded, source = load(spec, overrides)
    lock = read_lock(lock_path(spec, loaded.name))
    compile_loaded(loaded, source, (), lock)
    from specc.runtime.bench import report
    from specc.runtime.bench.suite import BenchOptions
    from specc.runtime.bench.suite import bench as run
    from specc.runtime.load import choose_target

    if picture is not None:
        from specc.runtime.bench.roofline import require

        require()
    words = ["specc", "bench", str(spec)]
    words += [word for text in overrides for word in ("--set", text)]
    words += [word for part in only for word in ("--only", part)]
    words += ["--at", at] if at else []
    chosen = choose_target(loaded, target)
    command = shlex.join([*words, "--target", chosen, "--steps", str(steps)])
    found = run(BenchOptions(loaded, lock, chosen, parts, steps, command, at), say)
    click.echo(json.dumps(report.data(found), indent=2) if as_json else report.text(found))
    if picture is not None:
        from specc.runtime.bench.roofline import roofline

        picture.write_bytes(roofline(found))
        say(f"wrote {picture}")


@cli.command()
@spec_argument
@target_option
@set_option
@click.option("--only", default="", metavar="TEXT", help="Nodes whose path contains TEXT.")
@click.option("--compile-only", is_flag=True, help="Compile all CUDA C++ into the cache and stop; needs no GPU.")
@click.option("--fresh", is_flag=True, help="Measure again what this machine has measured before.")
@json_option
@format_option
@formatted
def tune(
    spec: Path,
    target: str | None,
    overrides: tuple[str, ...],
    only: str,
    compile_only: bool,
    fresh: bool,
    as_json: bool,
) -> None:
    """Search the fastest kernel and tile for every node with a kernel of its own, on the spec's own sizes.

    Writes NAME.lock.json beside the spec after each node; `specc build` reads it. A search that was cut off goes on
    where it stopped. Candidates that do not compile, spill, or are less exact than plain Torch are listed with the
    reason. With --set, what a variant's nodes have joins the same lock: an entry holds for its very node alone.
    """
    from specc.compiler.check import load
    from specc.compiler.lock import lock_path, read_lock
    from specc.compiler.targets import TARGETS

    loaded, _ = load(spec, overrides)
    path = lock_path(spec, loaded.name)
    lock = read_lock(path)
    from specc.runtime.load import choose_target
    from specc.runtime.tune import report
    from specc.runtime.tune.search import TuneOptions
    from specc.runtime.tune.search import tune as run

    compiled = next((name for name in loaded.targets if "wgmma" in TARGETS[name].features), None)
    chosen = compiled if compile_only and target is None and compiled else choose_target(loaded, target)
    found = run(TuneOptions(loaded, chosen, lock, path, only, compile_only, fresh), say)
    click.echo(json.dumps(report.data(found), indent=2) if as_json else report.text(found))
    if not compile_only:
        say(f"wrote {path}; next: specc build {spec}")
