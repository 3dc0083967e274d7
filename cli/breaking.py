"""The `breaking` command, which lists changes that stop old checkpoints and artifacts from loading."""

import subprocess
from pathlib import Path

import click

from specc.cli.options import SPECS, Compiling, StatedPath, all_specs
from specc.cli.output import command_output


@click.command("breaking", cls=Compiling)
@click.argument("specs", nargs=-1, type=StatedPath())
@click.option(
    "--against",
    required=True,
    metavar="REF|SPEC",
    help="The old specs: a revision of the git repository of the specs, such as main, or the file of one spec.",
)
def command(specs: tuple[Path, ...], against: str) -> int:
    """List the changes of specs that stop old checkpoints and artifacts from loading.

    The command compares three things: the names and shapes of parameters, their storage in artifacts, and the ids of
    tokens. By default, it compares all specs in specs/ with the specs in a git revision. A removed spec is a finding. A
    new spec is not a finding. The exit code is 1 if there are findings.
    """
    from specc.compiler.compare.breaking import CODE, breaking_changes, interface_of
    from specc.compiler.errors import Diagnostic

    findings: list[Diagnostic] = []
    if Path(against).is_file():
        chosen = list(specs) or all_specs()
        if len(chosen) > 1:
            raise click.UsageError("--against is the file of one spec: name exactly one spec to compare with it")
        findings += breaking_changes(interface_of(Path(against), ""), interface_of(chosen[0], ""))
    else:
        chosen = list(specs) or sorted({*SPECS.glob("*.yaml"), *_specs_at(against, SPECS)}) or all_specs()
        for path in chosen:
            text = _text_at(against, path)
            if text is not None and not path.exists():
                findings.append(Diagnostic(CODE, f"the spec was removed since {against}", "", str(path)))
            elif text is not None or not path.exists():  # reading a spec that never existed is an error
                new = interface_of(path, "")
                findings += breaking_changes(interface_of(text or "", f"{against}:{path}"), new)
    for finding in findings:
        help = f"\n  = help: {finding.hint}" if finding.hint else ""
        text = f"{finding.file}:{finding.mark.line}: {CODE} {finding.message}{help}"
        command_output().find(finding, text)
    if not findings:
        click.echo(f"{len(chosen)} spec{'s' if len(chosen) > 1 else ''}: no breaking change since {against}")
    return int(bool(findings))


def _git(path: Path, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
    """Runs git in the nearest existing folder above `path`. In the arguments, {} stands for `path` in this folder."""
    from specc.compiler.errors import EnvironmentProblem

    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    words = [argument.replace("{}", f"./{path.absolute().relative_to(folder)}") for argument in arguments]
    try:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=False)
    except FileNotFoundError:
        raise EnvironmentProblem(
            "git is not installed", "install git, or name the file of a spec with --against"
        ) from None


def _revision(against: str, path: Path) -> str:
    from specc.compiler.errors import SpeccError

    if _git(path, "rev-parse", "--git-dir").returncode:
        message = f"{path} is not in a git repository, and {against} is not a file"
        raise SpeccError(message, "name the old spec with --against, or compare in a repository")
    revision = _git(path, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{against}^{{commit}}")
    if revision.returncode:
        message = f"{against} is neither a file nor a revision of git"
        raise SpeccError(message, "name a spec, a branch, a tag or a commit")
    return revision.stdout.decode().strip()


def _text_at(against: str, path: Path) -> str | None:
    shown = _git(path, "show", f"{_revision(against, path)}:{{}}")
    return shown.stdout.decode("utf-8", "replace") if shown.returncode == 0 else None


def _specs_at(against: str, folder: Path) -> list[Path]:
    listed = _git(folder, "ls-tree", "-z", "--name-only", _revision(against, folder), "{}/")
    names = (name for name in listed.stdout.decode().split("\0") if name.endswith(".yaml"))
    return [folder / Path(name).name for name in names]
