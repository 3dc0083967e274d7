"""The command line in processes of its own: what a command imports, how an interrupt ends, and life without torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def imported(*arguments: str) -> set[str]:
    """What a fresh interpreter has imported when a command ends."""
    text = (
        "import sys\nfrom specc.cli.app import run\n"
        f"code = run({list(arguments)!r})\nsys.stdout.flush()\n"
        "sys.stderr.write('\\n@' + ' '.join(sys.modules))\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return set(done.stderr.rpartition("@")[2].split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["build", "--help"]])
def test_help_imports_little(arguments: list[str]) -> None:
    assert imported(*arguments).isdisjoint({"torch", "pydantic", "jinja2", "numpy", "ruamel.yaml", "asyncio"})


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate", "specs/gpt_mlp35_base.yaml"],
        ["plan", "specs/gpt_mlp35_base.yaml"],
        ["build", "specs/gpt_mlp35_base.yaml", "--check"],
        ["build", "--all", "--diff"],
        ["diff", "specs/gpt_mini.yaml", "specs/gpt_mlp35_base.yaml"],
        ["schema"],
        ["explain", "specs/gpt_mlp35_base.yaml"],
        ["ir", "specs/gpt_mlp35_base.yaml"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_needs_no_torch_imports_none(arguments: list[str]) -> None:
    found = imported(*arguments)
    assert found.isdisjoint({"torch", "triton", "numpy"})
    assert "pydantic" in found  # else this test would see nothing


def test_interrupting_a_process_ends_with_130(tmp_path: Path) -> None:
    text = (
        "import os, signal, sys\nfrom specc.cli import app\nfrom specc.compiler import build\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "def stop(*a, **k): os.kill(os.getpid(), signal.SIGINT)\n"
        "build.compile_spec = stop\nsys.argv[1:] = ['plan', 'specs/gpt_mini.yaml']\napp.main()"
    )
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, env={**os.environ})
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")


def test_without_torch_what_runs_a_model_is_an_environment_error() -> None:
    """The core install validates, plans, builds and diffs; the rest says what to install."""
    text = (
        "import sys\nsys.modules['torch'] = None\nfrom specc.cli.app import run\n"
        "print([run(words.split()) for words in sys.argv[1:]])"
    )
    commands = (
        "plan specs/gpt_mini.yaml",
        "verify specs/gpt_mini.yaml",
        "generate x.specc",
        "train specs/gpt_mini.yaml",
    )
    done = subprocess.run([sys.executable, "-c", text, *commands], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[0, 3, 3, 3]", done.stderr
    assert done.stderr.count("pip install 'specc[train]'") == 3 and "Traceback" not in done.stderr
