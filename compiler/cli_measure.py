"""The commands that measure and verify. Torch is imported when one of them runs, not before."""

import json
import shlex
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

import rich_click as click

from specc.compiler.cli import (
    checked_targets,
    cli,
    device_option,
    format_option,
    formatted,
    json_option,
    set_option,
    spec_argument,
    target_option,
)
from specc.compiler.cli_run import Repeatable, joined_world, say

PARTS = ("kernels", "groups", "step", "table", "decode", "int8")


@cli.command(cls=Repeatable)
@spec_argument
@device_option
@set_option
@click.option(
    "--only", multiple=True, type=click.Choice(PARTS), help="One part; may be repeated. All of the spec where unset."
)
@click.option("--at", default="", metavar="TEXT", help="Of kernels, groups and int8, those whose path contains TEXT.")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Training steps to time, of each build and each row of the table.",
)
@click.option("--gpus", type=click.IntRange(min=1), help="Processes for the table's rows of several, one a GPU.")
@click.option(
    "--weights",
    type=click.Path(exists=True, path_type=Path),
    metavar="RUN|ARTIFACT",
    help="What `decode` decodes with; where unset, weights as training starts, which seldom end a line.",
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
    gpus: int | None,
    weights: Path | None,
    picture: Path | None,
    as_json: bool,
) -> int:
    """Time every kernel, every fused group and the training step beside eager Torch, torch.compile and cuBLAS.

    Sizes are the spec's own: a micro-batch of whole windows. Floors are what bytes and operations cost at ceilings
    that are measured in the same run. A kernel with wrong values is an error and gets no time.

    Of a model of pairs also `table`, training and validation on one GPU and on several, with a cache and without;
    `decode`, lines a second in each dtype; and `int8`, the deployed products beside torch._int_mm.
    """
    from specc.compiler.build import compile_loaded
    from specc.compiler.plan.lock import lock_path, read_lock
    from specc.compiler.spec.check import load
    from specc.runtime.distributed.launch import is_launched, launch, require_devices
    from specc.runtime.model.load import choose_target

    parts = tuple(part for part in PARTS if part in only)
    if picture is not None and parts and not {"kernels", "groups"} & {*parts}:
        raise click.UsageError(f"--picture shows kernels and groups; {' and '.join(parts)} alone has neither")
    for option, given, part in (("--gpus", gpus, "table"), ("--weights", weights, "decode")):
        if given is not None and parts and part not in parts:
            raise click.UsageError(f"{option} is for {part}, and --only leaves that out")
    if picture is not None and not picture.parent.is_dir():
        raise click.UsageError(f"there is no folder {picture.parent} for the picture")
    with joined_world() if is_launched() else nullcontext() as world:
        loaded, source = load(spec, overrides)
        lock = read_lock(lock_path(spec, loaded.name))
        compile_loaded(loaded, source, (), lock)
        chosen = choose_target(loaded, target)  # one, however many processes: --gpus 2 beside --gpus 1 compares
        if gpus is not None and world is not None and gpus != world.size:
            raise click.UsageError(f"--gpus {gpus}, but {world.size} processes were started")
        if gpus is not None and world is None:
            require_devices(gpus, loaded, chosen)
            if gpus > 1:
                context = click.get_current_context()
                assert context is not None
                return launch(gpus, context.meta["arguments"], say)
        from specc.runtime.bench import report
        from specc.runtime.bench.suite import BenchOptions, follow
        from specc.runtime.bench.suite import bench as run

        if picture is not None:
            from specc.runtime.bench.roofline import require

            require()
        words = ["specc", "bench", str(spec)]
        words += [word for text in overrides for word in ("--set", text)]
        words += [word for part in parts for word in ("--only", part)]
        words += ["--at", at] if at else []
        words += ["--weights", str(weights)] if weights is not None else []
        words += ["--gpus", str(gpus)] if gpus is not None else []
        command = shlex.join([*words, "--target", chosen, "--steps", str(steps)])
        options = BenchOptions(loaded, lock, chosen, parts, steps, command, at, weights)
        if world is not None and world.rank:
            follow(options, world)
            return 0
        found = run(options, say, world)
        click.echo(json.dumps(report.data(found), indent=2) if as_json else report.text(found))
        if picture is not None:
            from specc.runtime.bench.roofline import roofline

            picture.write_bytes(roofline(found))
            say(f"wrote {picture}")
    return 0


@cli.command()
@spec_argument
@target_option
@set_option
@click.option("--only", default="", metavar="TEXT", help="Nodes whose path contains TEXT.")
@click.option("--compile-only", is_flag=True, help="Compile all CUDA C++ into the cache and stop; needs no GPU.")
@click.option("--fresh", is_flag=True, help="Measure again what was measured before, if on more rows.")
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
    from specc.compiler.plan.lock import lock_path, read_lock
    from specc.compiler.spec.check import load
    from specc.compiler.targets import TARGETS

    loaded, _ = load(spec, overrides)
    path = lock_path(spec, loaded.name)
    lock = read_lock(path)
    from specc.runtime.model.load import choose_target
    from specc.runtime.tune import report
    from specc.runtime.tune.search import TuneOptions
    from specc.runtime.tune.search import tune as run

    compiled = next((name for name in loaded.targets if "wgmma" in TARGETS[name].features), None)
    chosen = compiled if compile_only and target is None and compiled else choose_target(loaded, target)
    found = run(TuneOptions(loaded, chosen, lock, path, only, compile_only, fresh), say)
    click.echo(json.dumps(report.data(found), indent=2) if as_json else report.text(found))
    if not compile_only:
        say(f"wrote {path}; next: specc build {shlex.quote(str(spec))}")


@cli.command()
@spec_argument
@target_option
@json_option
@format_option
@formatted
def verify(spec: Path, target: str | None, as_json: bool) -> int:
    """Hold the generated code to the plan (torch.fx) and to float64 references; look for leaks.

    Exit 1 where a check fails, 3 where a target that was named cannot run here.
    """
    from specc.compiler.build import compile_spec
    from specc.compiler.plan.lock import lock_path, read_lock

    wanted = checked_targets(spec, target)
    built = compile_spec(spec, (), wanted)
    lock = read_lock(lock_path(spec, built.spec.name))
    from specc.runtime.verify.deployed import verify_deployed
    from specc.runtime.verify.verify import verify as checks

    found = []
    words = {True: "ok", False: "FAILED", None: "not here"}
    targets = wanted or built.spec.targets
    for check in chain(checks(built.spec, targets, lock=lock), verify_deployed(built.spec, targets)):
        found.append(check)
        if not as_json:
            click.echo(f"{check.target:<6} {words[check.ok]:<8} {check.name}: {check.detail}")
    if as_json:
        rows = [{"target": c.target, "name": c.name, "ok": c.ok, "detail": c.detail} for c in found]
        click.echo(json.dumps(rows, indent=2))
    if any(check.ok is False for check in found):
        return 1
    return 3 if target is not None and any(check.ok is None for check in found) else 0
