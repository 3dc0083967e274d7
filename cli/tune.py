"""The `tune` command. Torch is imported only when it runs."""

import json
import shlex
from pathlib import Path

import rich_click as click

from specc.cli.options import format_option, json_option, set_option, spec_argument, target_option
from specc.cli.output import say


@click.command("tune")
@spec_argument
@target_option
@set_option
@click.option("--only", default="", metavar="TEXT", help="Nodes whose path contains TEXT.")
@click.option("--compile-only", is_flag=True, help="Compile all CUDA C++ into the cache and stop; needs no GPU.")
@click.option("--fresh", is_flag=True, help="Measure again what was measured before, if on more rows.")
@json_option
@format_option
def command(
    spec: Path,
    target: str | None,
    overrides: tuple[str, ...],
    only: str,
    compile_only: bool,
    fresh: bool,
    as_json: bool,
) -> None:
    """Search the fastest kernel and tile for every node with a kernel of its own, on the spec's own sizes.

    Writes NAME.lock.json next to the spec after each node; `specc build` reads it. An interrupted search resumes from
    its results. Candidates that do not compile, spill, or are less exact than plain Torch are listed with the reason.
    With --set, results for the nodes of the variant are added to the same lock: an entry applies only to the node that
    it was measured for. Library products and, without --only, whole training steps are measured too: PLAN.md contains
    their times.
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
    found = run(TuneOptions(loaded, chosen, lock, path, only, compile_only, fresh, rest=True), say)
    click.echo(json.dumps(report.data(found), indent=2) if as_json else report.text(found))
    if not compile_only:
        say(f"wrote {path}; next: specc build {shlex.quote(str(spec))}")
