"""Help and usage come from rich_click, which other commands do not import."""

import os
import re
import subprocess
import sys

import pytest

from specc.cli.app import specc as group

SHOWN = {"COLUMNS": "100", "TERM": "xterm-256color"}


def shown(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from specc.cli.app import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | SHOWN | environment)


def test_help_of_the_group_lists_its_commands_in_order() -> None:
    result = shown("--help")
    assert result.returncode == 0
    assert "╭─ Commands" in result.stdout
    names = re.findall(r"^│ ([a-z]+)  ", result.stdout, re.MULTILINE)
    assert names == list(group.commands)
    assert shown("-h").stdout == result.stdout


def test_a_group_without_a_command_shows_its_help() -> None:
    result = shown("data")
    assert (result.returncode, result.stderr) == (2, "")
    assert result.stdout.rstrip("\n") == shown("data", "--help").stdout.rstrip("\n")


@pytest.mark.parametrize("command", ["build", "train"])
def test_help_has_colors_where_rich_click_does(command: str) -> None:
    plain, colored = shown(command, "--help").stdout, shown(command, "--help", FORCE_COLOR="1").stdout
    assert "\033[" not in plain
    assert "\033[1;36m--help" in colored
    assert re.sub(r"\033\[[\d;]*m", "", colored) == plain


def test_usage_errors_show_the_usage() -> None:
    result = shown("validate", "--unknown", "x.yaml")
    assert result.returncode == 2
    assert result.stderr.split("\n")[1].strip() == "Usage: specc validate [OPTIONS] SPECS..."
    assert "No such option" in result.stderr


def test_commands_do_not_import_what_prints_help() -> None:
    code = "import sys; from specc.cli.app import run; run(['schema']); sys.exit('rich_click' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert result.returncode == 0
