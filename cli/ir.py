"""The command that prints graphs."""

from pathlib import Path

import rich_click as click

from specc.cli.options import format_option, spec_argument, target_option
from specc.cli.project import checked_targets


@click.command("ir")
@spec_argument
@click.option("--after", default="fuse", show_default=True, help="The pass to stop after: lower, assign_quant or fuse.")
@click.option("--program", help="One program, e.g. train; all where unset.")
@target_option
@format_option
def command(spec: Path, after: str, program: str | None, target: str | None) -> None:
    """Print the graphs of a spec as text."""
    from specc.compiler.errors import SpecError
    from specc.compiler.pipeline import PIPELINE, run
    from specc.compiler.programs.programs import LoweringError
    from specc.compiler.report.explain import graphs_text
    from specc.compiler.spec.check import load, to_diagnostics

    passes = ["lower", *(name for name, _ in PIPELINE)]
    if after not in passes:
        raise click.UsageError(f"no pass is named {after}; the passes are {', '.join(passes)}")
    loaded, source = load(spec)
    chosen = checked_targets(spec, target) or loaded.targets
    try:
        programs = run(loaded, chosen[0], after)
    except LoweringError as error:
        raise SpecError(to_diagnostics(error.problems, source), source.texts) from None
    if program is not None and program not in [graph.name for graph in programs.graphs]:
        raise click.UsageError(f"no graph is named {program}; there are {', '.join(g.name for g in programs.graphs)}")
    click.echo(graphs_text(programs, program))
