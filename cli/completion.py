"""The `completion` command, which prints the script for completion in a shell."""

import click
from click import get_current_context


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the script that completes commands, options and files in a shell.

    For bash, add `eval "$(specc completion bash)"` to ~/.bashrc. For zsh, add `eval "$(specc completion zsh)"` to
    ~/.zshrc. For fish, write the output to ~/.config/fish/completions/specc.fish.
    """
    from click.shell_completion import get_completion_class

    completer = get_completion_class(shell)
    assert completer is not None
    click.echo(completer(get_current_context().find_root().command, {}, "specc", "_SPECC_COMPLETE").source())
