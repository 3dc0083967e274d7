"""The `ir` command, which prints graphs."""

from pathlib import Path

import click

from specc.cli.options import Compiling, checked_targets, set_option, spec_argument, target_option


@click.command("ir", cls=Compiling)
@spec_argument
@click.option("--after", "name", default="merge_linears", show_default=True, help="Print the graphs after this pass.")
@click.option("--program", help="Program to print, such as train. By default, all programs.")
@set_option
@target_option
def command(spec: Path, name: str, program: str | None, overrides: tuple[str, ...], target: str | None) -> None:
    """Print the graphs of a spec as text."""
    from specc.compiler.errors import SpecError
    from specc.compiler.pipeline import after, forms
    from specc.compiler.plan.lock import lock_path, read_lock
    from specc.compiler.programs.programs import LoweringError
    from specc.compiler.report.explain import graphs_text
    from specc.compiler.spec.check import load, to_diagnostics

    if name not in forms():
        raise click.UsageError(f"no pass is named {name}; the passes are {', '.join(forms())}")
    loaded, source = load(spec, overrides)
    chosen = checked_targets(spec, target) or loaded.targets
    try:
        programs = after(loaded, chosen[0], name, read_lock(lock_path(spec, loaded.name)))
    except LoweringError as error:
        raise SpecError(to_diagnostics(error.problems, source), source.texts) from None
    except ValueError as error:
        raise click.UsageError(f"{name} is not a pass of this model: {error}") from None
    if program is not None and program not in [graph.name for graph in programs.graphs]:
        raise click.UsageError(f"no graph is named {program}; there are {', '.join(g.name for g in programs.graphs)}")
    click.echo(graphs_text(programs, program))
