"""The `tune` command. It imports Torch only when it runs."""

import json
from pathlib import Path

import click

from specc.cli.options import json_option, set_option, spec_argument, target_option
from specc.cli.output import say
from specc.compiler.text.shell import shell_path


@click.command("tune")
@spec_argument
@target_option
@set_option
@click.option("--only", default="", metavar="TEXT", help="Search only for nodes whose path contains TEXT.")
@click.option("--compile-only", is_flag=True, help="Compile all CUDA C++ into the cache and stop. Needs no GPU.")
@click.option("--fresh", is_flag=True, help="Repeat measurements that the lock already contains.")
@click.option(
    "--rest", is_flag=True, help="Measure only library matrix products and whole steps. Tile sizes do not change."
)
@json_option
def command(
    spec: Path,
    target: str | None,
    overrides: tuple[str, ...],
    only: str,
    compile_only: bool,
    fresh: bool,
    rest: bool,
    as_json: bool,
) -> None:
    """Search for the fastest kernel and tile size of each node, at the sizes of the spec.

    After each node, the results are written to the lock file NAME.lock.json next to the spec. `specc build` reads this
    file. An interrupted search resumes where it stopped. The output lists each rejected candidate with the reason. For
    example, a candidate does not compile, spills registers, or is less accurate than plain Torch.

    With --set, the results are added to the same lock file. They apply only to nodes of the same kind and sizes.

    Library matrix products are measured too. Without --only, whole training steps are also measured. PLAN.md shows all
    these times.
    """
    if rest and (only or compile_only or fresh):
        raise click.UsageError("--rest does not search tile sizes: use it without --only, --compile-only and --fresh")
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
    results = run(TuneOptions(loaded, chosen, lock, path, only, compile_only, fresh, rest=True, search=not rest), say)
    click.echo(json.dumps(report.data(results), indent=2) if as_json else report.text(results))
    if not compile_only:
        say(f"wrote {path}; next: specc build {shell_path(spec)}")
