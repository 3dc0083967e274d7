"""Writes paths as words of shell commands, for the commands that messages propose."""

import shlex


def shell_path(path: object) -> str:
    """Returns a path, quoted for a shell. A path with a leading dash, which a command reads as an option, begins with
    `./`. The path `-` is standard input, and remains."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") and text != "-" else text)
