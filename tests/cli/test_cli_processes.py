"""The command line in processes of its own: what a command imports, how an interrupt ends, and life without torch."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from export_samples import random_arrays
from logged_runs import logged_run

from specc.compiler.build import canonical
from specc.compiler.spec.check import load
from specc.runtime.artifact.artifact import ArtifactContents, write_artifact
from specc.runtime.artifact.deployment import deployment_of

ROOT = Path(__file__).parents[2]


def imported(*arguments: str, codes: tuple[int, ...] = (0, 1)) -> set[str]:
    """The modules that a fresh interpreter has imported when a command ends."""
    text = (
        "import sys\nfrom specc.cli.app import run\n"
        f"code = run({list(arguments)!r})\nsys.stdout.flush()\n"
        "sys.stderr.write('\\n@' + ' '.join(sys.modules))\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in codes, done.stderr
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
    result = imported(*arguments)
    assert result.isdisjoint({"torch", "triton", "numpy"})
    assert "pydantic" in result  # else this test would see nothing


@pytest.mark.parametrize("command", ["eval", "generate", "size", "quantize", "export"])
def test_a_path_that_is_not_there_is_answered_at_once(command: str) -> None:
    heavy = {"torch", "numpy", "pydantic", "jinja2"}
    assert imported(command, "nowhere.specc", codes=(2,)).isdisjoint(heavy)


@pytest.mark.parametrize("command", ["import", "profile"])
def test_an_input_that_is_not_there_is_an_error_before_torch_is_imported(command: str) -> None:
    assert "torch" not in imported(command, "nowhere.yaml", codes=(2,))


def test_counting_the_bytes_of_an_artifact_needs_no_torch(tmp_path: Path) -> None:
    text, artifact = canonical(load(ROOT / "specs/gpt_mini.yaml")[0]).encode(), tmp_path / "mini.specc"
    _, deployment = deployment_of(text)
    layout = deployment.layout
    tensors = random_arrays(list(layout), 0)
    contents = ArtifactContents(text, layout, tensors, deployment.interface, deployment.code)
    write_artifact(artifact, contents, quality=1)
    result = imported("size", str(artifact))
    assert "torch" not in result and "numpy" in result


def test_checking_a_sweep_and_reading_logs_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text("spec: specs/gpt_mini.yaml\ntarget: cpu\n")
    result = imported("sweep", str(tmp_path / "sweep.yaml"), "--dry-run")
    assert result.isdisjoint({"torch", "numpy", "matplotlib"})
    logged_run(tmp_path / "a", 3.0)
    logged_run(tmp_path / "b", 2.0, ["train.seed=7"])
    assert imported("compare", str(tmp_path / "a"), str(tmp_path / "b")).isdisjoint({"torch", "numpy", "matplotlib"})


def test_checking_renders_nothing() -> None:
    assert "jinja2" not in imported("validate", "specs/gpt_mini.yaml")


def test_interrupting_a_process_ends_with_130(tmp_path: Path) -> None:
    text = (
        "import os, signal, sys\nfrom specc.cli import app\nfrom specc.compiler import build\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "def stop(*a, **k): os.kill(os.getpid(), signal.SIGINT)\n"
        "build.plan_spec = stop\nsys.argv[1:] = ['validate', 'specs/gpt_mini.yaml']\napp.main()"
    )
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, env={**os.environ})
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")


def test_a_signal_while_an_error_is_reported_ends_with_75() -> None:
    """As torchrun ends a rank that is about to fail, because another rank has failed."""
    text = (
        "import os, signal, sys\nfrom specc.cli import app\nfrom specc.compiler import build\n"
        "def fail(*a, **k): raise ValueError\ndef stop(*a): os.kill(os.getpid(), signal.SIGTERM)\n"
        "build.plan_spec, app.failed = fail, stop\nsys.argv[1:] = ['validate', 'specs/gpt_mini.yaml']\napp.main()"
    )
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (75, "")


def test_without_torch_what_runs_a_model_is_an_environment_error() -> None:
    """The core install validates, plans, builds and diffs; the rest says what to install."""
    text = (
        "import sys\nsys.modules['torch'] = None\nfrom specc.cli.app import run\n"
        "print([run(words.split()) for words in sys.argv[1:]])"
    )
    commands = (
        "plan specs/gpt_mini.yaml",
        "verify specs/gpt_mini.yaml",
        "generate specs/gpt_mini.yaml",
        "train specs/gpt_mini.yaml",
    )
    done = subprocess.run([sys.executable, "-c", text, *commands], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[0, 3, 3, 3]", done.stderr
    assert done.stderr.count("pip install 'specc[train]'") == 3 and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["-m", "cli"], ["cli/__main__.py"]])
def test_a_source_tree_that_is_not_installed_is_an_environment_error(arguments: list[str]) -> None:
    command = [sys.executable, "-S", *arguments, "validate", "specs/gpt_mini.yaml"]  # -S: without installed packages
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 3 and done.stdout == ""
    assert done.stderr.startswith("error: E002 specc is not installed\n  = help: ") and done.stderr.count("\n") == 2


@pytest.mark.parametrize("spec", ["gpt_mini", "poly_attn"])
def test_data_that_does_not_exist_is_an_error_before_torch_is_imported(spec: str) -> None:
    text = "import sys\nfrom specc.cli.app import run\nprint(run(sys.argv[1:]), 'torch' in sys.modules)"
    command = [sys.executable, "-c", text, "train", f"specs/{spec}.yaml", "--target", "cpu", "--data", "none.txt"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "2 False"
    assert done.stderr.startswith("error: U005 none.txt: no such file or folder")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [
        *("--version", "--help", "plan specs/gpt_mini.yaml", "schema"),
        *("validate specs/gpt_mini.yaml --format json", "validate specs/gpt_mini.yaml --format sarif"),
        *("plan specs/gpt_mini.yaml --format github", "diff nope.yaml nope.yaml --format json"),
    ],
)
def test_output_to_a_full_disk_is_an_environment_error(arguments: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "specc.cli", *arguments.split()]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 3
    notes = "specs/gpt_mini.yaml: ok\n" if arguments.startswith("validate") else ""
    assert done.stderr == f"{notes}error: E003 standard output cannot be written: No space left on device\n"


def test_notes_that_cannot_be_written_change_nothing() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "specc.cli", "build", "specs/nope.yaml"]
        assert subprocess.run(command, cwd=ROOT, stderr=full).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "closed"), [("plan specs/gpt_mini.yaml", 1), ("validate nope.yaml", 2), ("validate -", 0)]
)
def test_closed_streams_are_empty(arguments: str, closed: int) -> None:
    command = f"exec {sys.executable} -m specc.cli {arguments} {closed}>&-"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == (0 if closed == 1 else 2) and "Traceback" not in done.stderr
    assert closed != 0 or "S002 the file is empty" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_during_an_import_ends_the_process(number: int, tmp_path: Path) -> None:
    """An exception there would reach the import of an extension, which may report another one or none."""
    (tmp_path / "kills.py").write_text(
        f"import os\ntry:\n    os.kill(os.getpid(), {int(number)})\nexcept BaseException:\n    pass\n"
    )
    code = "from specc.cli.app import pre_emptible\nwith pre_emptible():\n    import kills\nprint('went on')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr == f"pre-empted by {signal.Signals(number).name}\n"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_a_command_has_completed_changes_nothing(number: int) -> None:
    """The teardown of Torch takes about a second, in which the work is already saved."""
    kill = f"import atexit, os\natexit.register(os.kill, os.getpid(), {int(number)})\n"
    code = f"{kill}from specc.cli.app import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("specc, version")


def test_a_signal_after_training_has_ended_changes_nothing(tmp_path: Path) -> None:
    code = (
        "import os, click\nfrom specc.cli.app import main\necho = click.echo\n"
        "def killing(text='', **settings):\n    echo(text, **settings)\n"
        f"    if text.startswith('next: '):\n        os.kill(os.getpid(), {int(signal.SIGTERM)})\n"
        "click.echo = killing\nmain()"
    )
    sets = ["model.dim=32", "model.context=64", "model.blocks.count=1", "train.micro_batch=8", "train.steps=1"]
    sets += ["train.tokens_per_step=512", "train.schedule={warmdown_steps: 0}", "train.validate_tokens=512"]
    words = ["train", "specs/gpt_mini.yaml", "--target", "cpu", "--data", "stdlib", "--run", str(tmp_path / "run")]
    command = [sys.executable, "-c", code, *words, *(word for change in sets for word in ("--set", change))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "next: specc quantize" in done.stdout, done.stderr
