"""Every command that README.md and docs/ show runs, or parses where it needs what a test does not have.

The commands of a document run one after the other in a copy of the specs, with a run of the quickstart's model that has
been trained for a few steps. `SPECC_GOLDEN=1 pytest tests/docs` writes the outputs that documents show anew.
"""

import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path

import click
import pytest
from command_server import folder_of_specc, shell_environment
from documents import DOCUMENTS, ROOT, Command, ShownChange, ShownFile, arguments_of, matches, rewritten, steps_of
from error_cases import patched
from fork_server import ForkServer

from specc.compiler.errors import SpeccError

(ENTRY,) = importlib.metadata.entry_points(group="console_scripts", name="specc")
APP = sys.modules[ENTRY.load().__module__]
GOLDEN = os.environ.get("SPECC_GOLDEN") == "1"
COPIED = ("specs", "generated", "compiler", "templates", "runtime", "cli")
SMALL_MODEL = "--set model.dim=32 --set model.context=64 --set model.blocks.count=2 --set train.micro_batch=8"
# What `# tested with smaller sizes` adds to a command.
SMALL = {
    "train": f"--target cpu {SMALL_MODEL} --set train.steps=4 --set train.tokens_per_step=1024 "
    "--set train.schedule.warmup_steps=1 --set train.schedule.warmdown_steps=2 --set train.validate_every=0 "
    "--set train.validate_tokens=2048",
    "profile": f"{SMALL_MODEL} --steps 1 --set train.tokens_per_step=1024",
    "bench": f"{SMALL_MODEL} --steps 1 --set train.tokens_per_step=1024",
    "quantize": "--max-tokens 512",
    "eval": "--max-tokens 512",
    "generate": "--max-tokens 2",
}


# A process that has imported what specc and the scripts of documents import, and no specc.
LIBRARIES = """
import click, jinja2, numpy, pydantic, rich_click, ruamel.yaml, safetensors.torch, torch, torch._dynamo
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
"""
EXTENDED = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("specc.cli", run_name="__main__", alter_sys=True)
"""
SCRIPT = """
import runpy, sys
sys.argv.pop(0)
sys.path.insert(0, "")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@cache
def libraries() -> ForkServer:
    return ForkServer(LIBRARIES)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the specs and a run of the quickstart's model, quantized."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(ROOT / "specs", folder / "specs")
    for command in ("train specs/gpt_mini.yaml --data stdlib --run runs/first", "quantize runs/first"):
        arguments = f"{command} {SMALL[command.split()[0]]}".split()
        assert specc(arguments, folder)[0] == 0
    return folder


def specc(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and output of a command, run in this process. The server forks the processes that it starts."""
    output = io.StringIO()
    before = Path.cwd()
    python = str(folder_of_specc() / "specc-python")
    os.chdir(folder)
    try:
        with redirect_stdout(output), redirect_stderr(output), pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.executable", python)
            return APP.run(arguments), output.getvalue()
    finally:
        os.chdir(before)


def extended_specc(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and output of a command of the specc that stands in a folder."""
    path, output = str(folder / "path"), folder.parent / "output"
    environment = {**os.environ, "PYTHONPATH": path}
    process = libraries().start(EXTENDED, (path, *arguments), environment, output, output, folder)
    return process.wait(), output.read_text()


def python(script: str, shown: str | None, folder: Path) -> tuple[int, str]:
    """Exit code and output of a Python script. What it prints is written to the file `shown`, if there is one."""
    output = folder.parent / "output"
    stdout = folder / shown if shown else output
    process = libraries().start(SCRIPT, (script,), os.environ, output, stdout, folder)
    return process.wait(), output.read_text()


def shell(command: str, folder: Path, extended: bool) -> tuple[int, str]:
    """Exit code and output of a command line. In an `extended` folder specc is the copy that stands there."""
    environment = shell_environment(forked=not extended)
    if extended:
        environment["PYTHONPATH"] = str(folder / "path")
        command = re.sub(r"\bspecc ", f"{sys.executable} -m specc.cli ", command)
    end = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return end.returncode, end.stdout


def require_parses(command: Command) -> None:
    """Holds a command that is not run to the options of its program."""
    arguments = arguments_of(command.text)
    if arguments is not None:
        group, names = APP.specc, ["specc"]
        while isinstance(group, click.Group):
            with click.Context(group) as context:
                name, entry, arguments = group.resolve_command(context, arguments)
            names.append(name)
            group = entry
        with suppress(SpeccError):  # a run or an artifact that only a GPU or the network would have made
            group.make_context(" ".join(names), list(arguments))
    elif command.text.startswith("make "):
        assert re.search(rf"^{command.text.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    else:
        extras = re.search(r"pip install .*\[([\w,]+)\]", command.text)
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert extras is None or set(extras[1].split(",")) <= set(known)
        assert extras or command.text.startswith(("pip install ", "git clone ", "cd "))


def require_known(words: list[str]) -> None:
    """Holds the command that a sentence names to the commands and options that there are."""
    command = APP.specc.loaded(APP.specc.commands[words[0]])
    if isinstance(command, click.Group):
        command = command.loaded(command.commands[words[1]])
    known = {name for option in command.params for name in option.opts}
    assert {word for word in words if word.startswith("--")} <= known, words


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_commands_of_a_document(document: Path, trained: Path, tmp_path: Path) -> None:
    steps = list(steps_of(document))
    extended = any(isinstance(step, ShownFile) and step.path.startswith("compiler/") for step in steps)
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    if extended:
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name, dirs_exist_ok=True)
        (folder / "path" / "specc").mkdir(parents=True)
        for name in ("compiler", "templates", "runtime", "cli"):
            (folder / "path" / "specc" / name).symlink_to(folder / name)
    text = document.read_text()
    for step in steps:
        if isinstance(step, ShownFile):
            (folder / step.path).parent.mkdir(parents=True, exist_ok=True)
            (folder / step.path).write_text(step.text)
        elif isinstance(step, ShownChange):
            path = folder / step.path
            path.write_text(patched(path.read_text(), step.change))
        elif step.reason:
            require_parses(step)
        else:
            where = f"{document.name}:{step.line}: {step.text}"
            arguments = arguments_of(step.text) or []
            extra = SMALL[arguments[0]] if step.small else ""
            if found := re.fullmatch(r"python (\w+\.py)(?: > ([\w.]+))?", step.text):
                code, output = python(found[1], found[2], folder)
            elif step.text.startswith("specc ") and not re.search(r"[|<>&;$]", step.text):
                code, output = (extended_specc if extended else specc)([*arguments, *extra.split()], folder)
            else:
                code, output = shell(f"{step.text} {extra}", folder, extended)
            if step.output is None:
                assert code == 0, f"{where}\n{output}"
            elif GOLDEN:
                shown = f"$ {step.text}\n{step.output}"
                text = text.replace(shown, f"$ {step.text}\n{rewritten(output, step.output)}")
            else:
                assert matches(output, step.output), f"{where}\n{output}"
    if GOLDEN:
        document.write_text(text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_links_names_and_paths_of_a_document(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (document.parent / target).exists(), target
    for words in re.findall(r"`specc ([^`]+)`", text):
        require_known(words.split())
    for path in re.findall(r"`((?:compiler|runtime|cli|templates|tests|specs|docs|benchmarks)/[\w./]*)`", text):
        assert (ROOT / path).exists(), path


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
