"""Completion of commands and options, by the shells themselves, and the CPU time of it."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHELLS = ("bash", "zsh", "fish")
LIMIT = 0.150  # seconds of CPU time, as `--help`; the best of several calls, since a machine may be busy
BASH = """
eval "$(specc completion bash)"
COMP_WORDS=({words}); COMP_CWORD={last}
_specc_completion specc
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
FISH = 'specc completion fish | source; complete --do-complete "{line}"'


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def output(command: list[str], **variables: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**environment(), **variables})
    assert done.returncode == 0, done.stderr
    return done.stdout


def completed(shell: str, *words: str) -> set[str]:
    """The completions that a shell offers for the last of the words after `specc`."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    line = " ".join(("specc", *words))
    if shell == "bash":
        quoted = " ".join(f"'{word}'" for word in ("specc", *words))
        lines = output(["bash", "-c", BASH.format(words=quoted, last=len(words))]).splitlines()
    elif shell == "fish":
        lines = [entry.split("\t")[0] for entry in output(["fish", "-c", FISH.format(line=line)]).splitlines()]
    else:  # the part of zsh that asks specc; a line editor shows its answer
        assert "compdef _specc_completion specc" in output(["zsh", "-fc", "specc completion zsh"])
        script = 'autoload -U compinit; compinit -u -D; eval "$(specc completion zsh)"; which _specc_completion'
        assert "_SPECC_COMPLETE=zsh_complete" in output(["zsh", "-fc", script])
        variables = {"_SPECC_COMPLETE": "zsh_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
        lines = output(["zsh", "-fc", "specc"], **variables).splitlines()[1::3]
    return {entry.strip() for entry in lines}


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_options_and_values_are_completed(shell: str) -> None:
    assert {"train", "tune"} <= completed(shell, "t") and "plan" not in completed(shell, "t")
    assert {"pack", "check", "fetch", "tokenizer"} <= completed(shell, "data", "")
    assert "--resume" in completed(shell, "train", "--re")
    assert completed(shell, "plan", "--format", "sa") == {"sarif"}


def cpu_time(command: list[str], **variables: str) -> float:
    """CPU seconds of a command and its children; the best of eight calls."""
    times = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        output(command, **variables)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_help_and_completion_take_little_time() -> None:
    assert cpu_time(["specc", "--help"]) < LIMIT
    words = {"_SPECC_COMPLETE": "bash_complete", "COMP_WORDS": "specc t", "COMP_CWORD": "1"}
    assert cpu_time(["specc"], **words) < LIMIT
