"""The command line: exit codes, what is printed where, and what is not imported."""

import errno
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import jsonschema
import pytest
from tiny_models import spec_data

from specc.cli import LAYERS, app, output
from specc.compiler.errors import EnvironmentProblem, SpeccError
from specc.compiler.errors.codes import CODES
from specc.compiler.errors.formats import schema_text
from specc.compiler.spec.check import load

ROOT = Path(__file__).parents[2]
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder of one small spec."""
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs/tiny.yaml").write_text(json.dumps(spec_data()))
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Shell:
    """Runs commands in process and keeps what the last one printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: str) -> int:
        self.capsys.readouterr()
        code = app.run(list(arguments))
        read = self.capsys.readouterr()
        self.out, self.err = ANSI.sub("", read.out), ANSI.sub("", read.err)
        return code


@pytest.fixture
def specc(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def bad(here: Path, **model: object) -> str:
    """A spec with one wrong value."""
    data = spec_data(**model)
    data["model"]["dim"] = 7
    (here / "bad.yaml").write_text(json.dumps(data, indent=1))
    return "bad.yaml"


TABLE = [
    (["--help"], 0),
    (["--version"], 0),
    (["build", "--help"], 0),
    ([], 2),
    (["nope"], 2),
    (["--nope"], 2),
    (["build", "nope.yaml"], 2),
    (["build", "specs/tiny.yaml", "--nope"], 2),
    (["plan"], 2),
    (["plan", "specs"], 2),
    (["plan", "specs/tiny.yaml", "--set", "train.steps=none"], 2),
    (["plan", "specs/tiny.yaml", "--set", "nonsense"], 2),
    (["plan", "specs/tiny.yaml", "--set", "train.steps=5"], 0),
    (["validate"], 2),
    (["validate", "specs/tiny.yaml"], 0),
    (["validate", "specs/tiny.yaml", "nope.yaml"], 2),
    (["explain", "specs/tiny.yaml"], 0),
    (["explain", "specs/tiny.yaml", "nope"], 2),
    (["explain", "specs/tiny.yaml", "--target", "sm90"], 2),
    (["ir", "specs/tiny.yaml", "--after", "nope"], 2),
    (["ir", "specs/tiny.yaml", "--program", "nope"], 2),
    (["ir", "specs/tiny.yaml", "--target", "sm90"], 2),
    (["diff", "specs/tiny.yaml", "specs/tiny.yaml"], 0),
    (["diff", "specs/tiny.yaml", "nope.yaml"], 2),
    (["init", "other"], 2),
    (["init", "Other", "--from", "tiny"], 2),
    (["init", "tiny", "--from", "tiny"], 2),
    (["schema", "--check"], 1),
    (["schema"], 0),
    (["schema", "findings"], 0),
    (["schema", "findings", "--check"], 2),
    (["schema", "nonsense"], 2),
    (["build", "--check"], 1),
    (["build", "--diff"], 1),
    (["build", "-"], 2),
    (["plan", "specs/tiny.yaml", "--diff"], 0),
    (["plan", "specs/tiny.yaml", "--format", "yaml"], 2),
    (["explain"], 0),
    (["explain", "S104"], 0),
    (["explain", "S999"], 2),
    (["explain", "S104", "node"], 2),
    (["render", "specs/tiny.yaml"], 0),
    (["render", "specs/tiny.yaml", "--set", "model.dimm=1"], 2),
    (["breaking", "specs/tiny.yaml", "--against", "specs/tiny.yaml"], 0),
    (["breaking", "specs/tiny.yaml"], 2),
    (["breaking", "--against", "no-such-branch"], 2),
    (["migrate", "specs/tiny.yaml", "--check"], 0),
    (["migrate", "nope.yaml"], 2),
    (["completion", "bash"], 0),
    (["completion", "tcsh"], 2),
    (["data"], 2),
    (["data", "nope"], 2),
    (["data", "check", "nope"], 2),
    (["train", "specs/tiny.yaml", "--steps", "-1"], 2),
    (["train", "nope.yaml"], 2),
    (["quantize", "nope"], 2),
    (["export", "nope"], 2),
    (["size", "nope"], 2),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "code"), TABLE, ids=[" ".join(arguments) or "nothing" for arguments, _ in TABLE])
def test_exit_codes(here: Path, specc: Shell, arguments: list[str], code: int) -> None:
    assert specc(*arguments) == code
    assert "Traceback" not in specc.err
    assert (specc.err or specc.out) != ""
    assert sorted(path.name for path in here.iterdir()) == ["specs"]


def test_an_unknown_command_is_named(specc: Shell) -> None:
    assert specc("nope") == 2
    assert "No such command 'nope'" in specc.err


class Broken(Exception):
    """An error that says nothing of an exit code."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpeccError("m", "h"), 2),
        (EnvironmentProblem("m", "h"), 3),
        (KeyboardInterrupt(), 130),
        (Broken("boom"), 70),
        (AssertionError("boom"), 70),
    ],
)
def test_each_error_has_its_exit_code(
    here: Path, specc: Shell, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def failing(*args: object, **words: object) -> None:
        raise error

    monkeypatch.setattr("specc.compiler.build.compile_spec", failing)
    assert specc("plan", "specs/tiny.yaml") == code
    assert ("Traceback" in specc.err) == (code == 70)
    if code == 70:
        assert "boom" in specc.err
        assert "this is a bug in specc" in specc.err
    elif code == 130:
        assert specc.err.strip() == "interrupted"
    else:
        assert specc.err == f"error: {error.code} m\n  = help: h\n"


def test_a_disk_that_refuses_is_no_bug(here: Path, specc: Shell) -> None:
    shutil.rmtree("specs")
    Path("specs").write_text("a file\n")
    assert specc("init", "other", "--from", str(ROOT / "specs/gpt_mini.yaml")) == 3
    assert specc.err == "error: E003 specs: File exists\n"


def test_a_reader_that_leaves_is_no_error() -> None:
    text = "from specc.cli.app import main; main()"
    command = f"{sys.executable} -c '{text}' ir specs/gpt_mlp35_base.yaml | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("form", ["json", "github", "text"])
@pytest.mark.parametrize("command", ["build", "validate", "plan", "explain", "ir"])
def test_errors_in_the_format_that_was_asked_for(here: Path, specc: Shell, command: str, form: str) -> None:
    name = bad(here)
    assert specc(command, name, "--format", form) == 2
    message = "2 heads do not divide dim 7"
    if form == "json":
        (result,) = json.loads(specc.out)
        assert (result["code"], result["message"], result["file"]) == ("S210", message, name)
        assert Path(name).read_text().splitlines()[result["line"] - 1].strip().startswith('"heads"')
        assert specc.err == ""
    elif form == "github":
        assert re.fullmatch(rf"::error file={name},line=\d+,col=\d+,title=S210::{message}%0A.*\n", specc.out)
    else:
        assert specc.out == ""
        assert re.match(rf"{name}:\d+:\d+: S210 {message}\n", specc.err)


def test_validate_tells_of_all_files_in_one_document(here: Path, specc: Shell) -> None:
    name = bad(here)
    shutil.copy(name, "worse.yaml")
    assert specc("validate", name, "specs/tiny.yaml", "worse.yaml", "nope.yaml", "--format", "json") == 2
    assert [(entry["file"], entry["code"]) for entry in json.loads(specc.out)] == [
        ("bad.yaml", "S210"),
        ("nope.yaml", "S001"),
        ("worse.yaml", "S210"),
    ]
    assert specc("validate", "specs/tiny.yaml", "--format", "json") == 0
    assert json.loads(specc.out) == []
    assert specc("validate", "specs/tiny.yaml") == 0
    assert specc.out == "specs/tiny.yaml: ok\n"


def test_validate_takes_overrides(here: Path, specc: Shell) -> None:
    assert specc("validate", "specs/tiny.yaml", "--set", "train.steps=7") == 0
    assert specc("validate", "specs/tiny.yaml", "--set", "model.dim=-7") == 2
    assert "--set model.dim" in specc.err
    assert specc("validate", "specs/tiny.yaml", "--set", "model.dim") == 2 and "S014" in specc.err


def test_validate_goes_as_far_as_a_build(here: Path, specc: Shell) -> None:
    Path("fuse.yaml").write_text(json.dumps(spec_data(fuse=({"blocks.*.nope": ["up", "act"]},))))
    assert specc("validate", "fuse.yaml") == 2
    assert "S302 fusion point blocks.*.nope matches no part of the model" in specc.err


def stamps(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted([folder, *folder.rglob("*")])}


def test_plan_compares_with_what_is_on_disk(here: Path, specc: Shell) -> None:
    assert specc("plan", "specs/tiny.yaml") == 0
    line = specc.out.splitlines()[-1]
    assert re.fullmatch(r"files        \d+ new: PLAN.md, .* and \d+ more, in generated/tiny", line)
    assert not Path("generated").exists()
    assert specc("build") == 0
    before = stamps(here / "generated")
    assert specc("plan", "specs/tiny.yaml", "--diff") == 0
    assert specc.out.splitlines()[-1] == "files        as built, in generated/tiny"
    (here / "other.yaml").write_text(Path("specs/tiny.yaml").read_text().replace("relu(x) ** 2", "gelu(x)"))
    shutil.copytree("generated", "was")
    assert specc("plan", "specs/tiny.yaml", "--json", "--set", "model.blocks.layers.1.act=gelu(x)") == 0
    files = json.loads(specc.out)["files"]
    Path("specs/tiny.yaml").write_text(Path("other.yaml").read_text())
    assert specc("plan", "specs/tiny.yaml", "--json") == 0 and json.loads(specc.out)["files"] == files
    assert specc("plan", "specs/tiny.yaml", "--diff") == 0
    assert "--- a/tiny/cpu/model.py\n+++ b/tiny/cpu/model.py\n" in specc.out
    assert "--- /dev/null\n+++ b/tiny/cpu/linear_gelu__n12_k8.py\n" in specc.out
    assert stamps(here / "generated") == before
    assert specc("build") == 0
    built = [line.split() for line in specc.out.splitlines() if line.split()[0] in files]
    names = {state: [name.removeprefix("generated/tiny/") for its, name in built if its == state] for state in files}
    assert names == files
    assert all(files.values()), "files are added, changed and removed"


def test_build_check_diff_and_hand_edits(here: Path, specc: Shell) -> None:
    assert specc("build", "--check") == 1
    assert "generated/tiny/cpu/model.py: missing" in specc.out.splitlines()
    assert not Path("generated").exists()
    assert specc("build") == 0  # the only spec
    assert "new      generated/tiny/cpu/model.py" in specc.out.splitlines()
    assert specc("build") == 0
    assert specc.out == "generated/tiny: up to date\n"
    assert specc("build", "--all", "--check") == 0
    assert specc.out == "1 spec: as built\n"
    before = stamps(here / "generated")
    model = Path("generated/tiny/cpu/model.py")
    text = model.read_text()
    plan = Path("generated/tiny/PLAN.md")
    model.write_text(text.replace("Model(nn.Module)", "Other(nn.Module)"))
    plan.write_bytes(plan.read_bytes().replace(b"\n", b"\r\n"))
    Path("generated/tiny/manifest.json").unlink()
    Path("generated/tiny/cpu/more.py").write_text("more = 1\n")
    Path("generated/gone").mkdir()
    edited = stamps(here / "generated")
    assert specc("build", "--all", "--check") == 1
    assert specc.out.splitlines() == [
        "generated/tiny/PLAN.md: line endings",
        "generated/tiny/cpu/model.py: changed",
        "generated/tiny/cpu/more.py: extra (no build made it; delete it)",
        "generated/tiny/manifest.json: missing",
        "generated/gone: extra",
    ]
    assert specc("build", "--diff") == 1
    assert "-class Other(nn.Module):\n+class Model(nn.Module):\n" in specc.out
    assert stamps(here / "generated") == edited != before
    assert specc("build") == 1
    assert (
        specc.err.startswith("error: F009 generated/tiny/PLAN.md was edited by hand")
        or "cpu/model.py was edited by hand" in specc.err
    )
    assert "build with --force" in specc.err
    assert stamps(here / "generated") == edited
    assert specc("build", "--force") == 0
    assert model.read_text() == text
    assert specc("build", "--diff", "specs/tiny.yaml") == 0  # a build leaves what is not its own
    assert specc("build", "--check", "specs/tiny.yaml") == 1
    Path("generated/tiny/cpu/more.py").unlink()
    Path("generated/gone").rmdir()
    assert specc("build", "--all", "--check") == 0


def test_build_without_a_spec_lists_the_choices(here: Path, specc: Shell) -> None:
    shutil.copy("specs/tiny.yaml", "specs/other.yaml")
    assert specc("build") == 2
    assert "name a spec: specs/other.yaml, specs/tiny.yaml" in specc.err
    for path in Path("specs").glob("*.yaml"):
        path.unlink()
    assert specc("build", "--all") == 2
    assert "there are no specs in specs/ here" in specc.err


def test_two_specs_of_one_name_do_not_share_a_folder(here: Path, specc: Shell) -> None:
    shutil.copy("specs/tiny.yaml", "specs/twin.yaml")
    assert specc("build", "--all") == 2
    assert "specs/tiny.yaml and specs/twin.yaml are both named tiny" in specc.err
    assert not Path("generated").exists()


def test_plan_is_short_and_says_the_same_as_json(specc: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name, count in (("gpt_mini", 1_017_496), ("gpt_mlp35_base", 29_374_040), ("gpt2_124m", 123_532_032)):
        assert specc("plan", f"specs/{name}.yaml") == 0
        lines = specc.out.splitlines()
        assert len(lines) <= 25
        assert f"{count:,}" in lines[1]
        assert specc("plan", f"specs/{name}.yaml", "--json") == 0
        data = json.loads(specc.out)
        assert data["parameters"] == count == sum(row["parameters"] for row in data["stored"])
        assert f"estimated {data['estimated_bytes']:,} bytes" in "\n".join(lines)
        assert set(data["kernels"]) == set(load(ROOT / f"specs/{name}.yaml")[0].targets)


def test_explain_gives_every_reason(specc: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert specc("explain", "specs/gpt_mlp35_base.yaml", "blocks.3.mlp.down.dgrad", "--target", "sm90", "--json") == 0
    (row,) = json.loads(specc.out)
    assert row["kernel"] == "gemm_evt (cutlass)"
    assert row["files"] == ["dgrad_mul__n1792_k512.cu", "dgrad_mul__n1792_k512.py"]
    assert {entry["kernel"] for entry in row["rejected"]} == {"linear_triton", "torch", "torch_epilogue"}
    assert all(entry["reason"] for entry in row["rejected"])
    assert specc("explain", "specs/gpt_mlp35_base.yaml", "blocks.*.mlp.up", "--target", "cpu") == 0
    assert specc.out.startswith("blocks.*.mlp.up + act on cpu: torch_epilogue (torch)\n")
    assert "  not linear_triton: cpu has no triton\n" in specc.out
    assert "in block.extend the node is in no fused group" in specc.out
    # as it is printed
    assert specc("explain", "specs/gpt_mlp35_base.yaml", "blocks.*.mlp.up + act", "--target", "cpu") == 0
    assert specc.out.startswith("blocks.*.mlp.up + act on cpu: torch_epilogue (torch)\n")
    assert specc("explain", "specs/gpt_mlp35_base.yaml", "blocks.0.attention.q", "--target", "cpu") == 0
    assert specc.out.startswith("blocks.*.attention.q on cpu: torch (torch)\n")


def test_explain_says_which_targets_have_no_kernels(here: Path, specc: Shell) -> None:
    """Without a node that was asked for there is none that could be wrong."""
    assert specc("explain", "specs/tiny.yaml") == 0 and "no kernels of its own" not in specc.out
    (here / "specs/tiny.yaml").write_text(json.dumps(spec_data(fuse=())))
    assert specc("explain", "specs/tiny.yaml") == 0
    assert specc.out == "tiny has no generated kernels on cpu: Torch computes all nodes\n"
    assert specc("explain", "specs/tiny.yaml", "--json") == 0 and json.loads(specc.out) == []
    assert specc("explain", "specs/tiny.yaml", "nope") == 2 and "is named nope" in specc.err


def test_ir_after_each_pass(here: Path, specc: Shell) -> None:
    assert specc("ir", "specs/tiny.yaml", "--after", "lower") == 0
    assert "fused_mlp" not in specc.out
    assert "mlp.act = pointwise(mlp.up)" in specc.out
    assert specc("ir", "specs/tiny.yaml") == 0
    assert "# fused group blocks.*.mlp\ngraph fused_mlp.forward(" in specc.out
    assert specc("ir", "specs/tiny.yaml", "--program", "decode") == 0
    assert specc.out.count("graph ") == 1
    assert specc.out.startswith("graph decode(ids: i64[B,1], ")


def test_diff_shows_and_counts(here: Path, specc: Shell) -> None:
    Path("other.yaml").write_text(Path("specs/tiny.yaml").read_text().replace("relu(x) ** 2", "gelu(x)"))
    assert specc("diff", "specs/tiny.yaml", "other.yaml") == 1
    assert specc.out.startswith("tiny -> tiny\nparameters   ")
    assert "+++ b/cpu/linear_gelu__n12_k8.py\n" in specc.out


def test_init_keeps_comments_and_refuses_to_overwrite(here: Path, specc: Shell) -> None:
    shutil.copy(ROOT / "specs/gpt_mlp35_base.yaml", "specs/gpt_mlp35_base.yaml")
    before = Path("specs/gpt_mlp35_base.yaml").read_text()
    for name, origin in (("mine", "gpt_mlp35_base"), ("mine2", "specs/gpt_mlp35_base.yaml")):
        assert specc("init", name, "--from", origin) == 0
        assert specc.out == f"wrote specs/{name}.yaml; next: specc plan specs/{name}.yaml\n"
        assert Path(f"specs/{name}.yaml").read_text() == before.replace("name: gpt_mlp35_base\n", f"name: {name}\n")
    assert specc("init", "mine", "--from", "gpt_mini") == 2
    assert specc("init", "mine", "--from", "gpt_mlp35_base") == 2
    assert "specs/mine.yaml exists already" in specc.err
    assert specc("init", "a/b", "--from", "gpt_mlp35_base") == 2
    assert "'a/b' is not a model name" in specc.err
    assert sorted(path.name for path in Path("specs").iterdir()) == [
        "gpt_mlp35_base.yaml",
        "mine.yaml",
        "mine2.yaml",
        "tiny.yaml",
    ]


def test_init_of_a_spec_whose_name_is_elsewhere(here: Path, specc: Shell) -> None:
    assert specc("init", "mine", "--from", "tiny") == 2
    assert "has no line `name: ...` at the left margin" in specc.err
    bad(here)
    assert specc("init", "mine", "--from", "bad.yaml") == 2
    assert "S210" in specc.err
    assert not Path("specs/mine.yaml").exists()


def test_schema_writes_and_checks(here: Path, specc: Shell) -> None:
    assert specc("schema") == 0
    text = specc.out
    assert json.loads(text)["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert specc("schema", "--write") == 0
    assert Path("specs/schema.json").read_text() == text
    assert specc("schema", "--check") == 0
    Path("specs/schema.json").write_text(text + "\n")
    assert specc("schema", "--check") == 1
    assert specc.out == "specs/schema.json: stale; run specc schema --write\n"


def commands(group: app.LazyGroup) -> Iterator[tuple[app.LazyGroup, click.Command]]:
    """All commands that help lists, as it lists them, with the group of each."""
    for entry in group.commands.values():
        yield from commands(entry) if isinstance(entry, app.LazyGroup) else [(group, entry)]


def test_help_lists_every_command_by_the_first_paragraph_of_its_help() -> None:
    listed = list(commands(app.specc))
    for group, entry in listed:
        command = group.loaded(entry)
        assert entry.name == command.name
        assert entry.help == " ".join((command.help or "").split("\n\n")[0].split())
    modules = {module.rstrip("_") for module in LAYERS[LAYERS.index("build") : LAYERS.index("app")] if module != "data"}
    assert {entry.name for group, entry in listed if group is app.specc} == modules


@pytest.mark.parametrize(
    "arguments", [["plan", "--nope"], ["build", "--check=1"], ["train", "--steps", "many"], ["nope"]]
)
def test_errors_of_the_command_line_have_the_format_too(specc: Shell, arguments: list[str]) -> None:
    assert specc(*arguments) == 2 and specc.out == ""
    assert specc(*arguments, "--format", "json") == 2 and specc.err == ""
    (error,) = json.loads(specc.out)
    assert error["message"] and error["hint"].endswith("--help")
    assert specc("--format=github", *arguments) == 2 and specc.err == ""
    assert specc.out.startswith("::error title=U001::")


@pytest.mark.parametrize(
    ("variables", "colors"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colors_are_for_terminals_that_want_them(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], colors: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not output.colored()  # here standard error is no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert output.colored() == colors


def test_every_command_takes_every_format(specc: Shell) -> None:
    for group, entry in commands(app.specc):
        command = group.loaded(entry)
        own = next(option for option in command.params if "--format" in option.opts)
        assert isinstance(own.type, click.Choice)
        if entry.name == "export":  # its format is that of the export; `specc --format json export` has that of errors
            continue
        assert set(own.type.choices) >= {"text", "json", "github", "sarif"}, entry.name
        words = [*([group.name] if group is not app.specc else []), entry.name, "--no-such-option"]
        assert specc(*map(str, words), "--format", "json") == 2 and specc.err == ""
        require_findings(specc.out, ["U001"])
        assert specc(*map(str, words), "--format", "sarif") == 2
        assert json.loads(specc.out)["runs"][0]["results"][0]["ruleId"] == "U001"
    assert specc("--format", "json", "export", "nowhere", "--format", "safetensors") == 2
    require_findings(specc.out, ["U002"])


def require_findings(document: str, codes: list[str]) -> list[dict[str, object]]:
    """Holds a document to the published schema, and to the codes of its findings."""
    findings: list[dict[str, object]] = json.loads(document)
    jsonschema.validate(findings, json.loads(schema_text()), jsonschema.Draft202012Validator)
    assert [finding["code"] for finding in findings] == codes
    return findings


@pytest.mark.parametrize(
    ("arguments", "code", "codes"),
    [
        (["validate", "specs/tiny.yaml"], 0, []),
        (["plan", "specs/tiny.yaml"], 0, []),
        (["plan", "nope.yaml"], 2, ["S001"]),
        (["build", "specs/tiny.yaml", "--check"], 1, ["F001"] * 6),
        (["build", "specs/tiny.yaml", "--diff"], 1, ["F001"]),
        (["explain", "specs/tiny.yaml"], 0, []),
        (["explain", "S104"], 0, []),
        (["explain", "S999"], 2, ["U001"]),
        (["ir", "specs/tiny.yaml"], 0, []),
        (["ir", "specs/tiny.yaml", "--after", "nope"], 2, ["U001"]),
        (["diff", "specs/tiny.yaml", "specs/tiny.yaml"], 0, []),
        (["diff", "specs/tiny.yaml", "other.yaml"], 1, ["F004"]),
        (["init", "a-b", "--from", "tiny"], 2, ["U002"]),
        (["schema"], 0, []),
        (["schema", "--check"], 1, ["F002"]),
        (["migrate", "old.yaml", "--check"], 1, ["F003"]),
        (["migrate", "specs/tiny.yaml", "--check"], 0, []),
    ],
)
def test_the_document_of_a_command_has_its_findings_and_nothing_else(
    here: Path, specc: Shell, arguments: list[str], code: int, codes: list[str]
) -> None:
    text = Path("specs/tiny.yaml").read_text()
    Path("other.yaml").write_text(text.replace("relu(x) ** 2", "gelu(x)"))
    Path("old.yaml").write_text(re.sub(r'"spec_version": \d', '"spec_version": 1', text))
    assert specc(*arguments, "--format", "json") == code
    require_findings(specc.out, codes)
    assert specc(*arguments, "--format", "sarif") == code
    assert [result["ruleId"] for result in json.loads(specc.out)["runs"][0]["results"]] == codes
    assert specc(*arguments, "--format", "github") == code
    assert re.findall(r"^::error .*title=(\w+)::", specc.out, re.MULTILINE) == codes
    assert specc(*arguments) == code and "::error" not in specc.out


def test_with_json_the_result_is_the_only_document(here: Path, specc: Shell) -> None:
    assert specc("plan", "specs/tiny.yaml", "--json", "--format", "json") == 0
    assert json.loads(specc.out)["parameters"] > 0
    assert specc("plan", "nope.yaml", "--json", "--format", "json") == 2
    require_findings(specc.out, ["S001"])


def test_a_bug_has_a_code_and_a_document(here: Path, specc: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object, **words: object) -> None:
        raise Broken("boom")

    monkeypatch.setattr("specc.compiler.build.plan_spec", failing)
    assert specc("validate", "specs/tiny.yaml", "--format", "json") == 70 and "Traceback" in specc.err
    (finding,) = require_findings(specc.out, ["B001"])
    assert finding["message"] == "Broken: boom"


def test_explain_of_a_code(here: Path, specc: Shell) -> None:
    assert specc("explain", "S104") == 0
    assert specc.out.startswith("S104: a value out of range, or not one of the choices (exit code 2)\n\nbad:\n")
    assert specc("explain", "s104", "--json") == 0
    (page,) = json.loads(specc.out)
    assert page["code"] == "S104" and page["bad"] != page["good"] and "S104" in page["message"]
    assert specc("explain") == 0 and f"S101  {CODES['S101']}\n" in specc.out
    assert specc("explain", "S104", "node") == 2 and specc("explain", "S1O4") == 2
    Path("S104").write_text(Path("specs/tiny.yaml").read_text())  # a file of this name is a spec
    assert specc("explain", "S104") == 0 and "on cpu" in specc.out


def test_drift_in_the_format_that_was_asked_for(here: Path, specc: Shell) -> None:
    assert specc("build") == 0
    assert specc("build", "--check", "--format", "json") == 0 and json.loads(specc.out) == []
    assert specc("build", "--check", "--format", "github") == 0 and specc.out == ""
    Path("generated/tiny/PLAN.md").unlink()
    assert specc("build", "--check", "--format", "json") == 1
    (finding,) = json.loads(specc.out)
    assert (finding["code"], finding["file"], finding["message"]) == ("F001", "generated/tiny/PLAN.md", "missing")
    assert specc("build", "--check", "--format", "github") == 1
    assert specc.out == "::error file=generated/tiny/PLAN.md,line=1,col=1,title=F001::missing%0Aspecc build\n"


def test_a_named_pipe_is_no_spec(here: Path, specc: Shell) -> None:
    os.mkfifo("pipe.yaml")
    assert specc("validate", "pipe.yaml") == 2
    assert "S001 this is a named pipe" in specc.err and "`-`" in specc.err


def test_a_spec_on_standard_input(here: Path, specc: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def give(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    text = Path("specs/tiny.yaml").read_text()
    assert specc("build") == 0
    for arguments, start in (
        (["validate", "-"], "<stdin>: ok\n"),
        (["plan", "-"], "tiny: "),
        (["build", "--check", "-"], "1 spec: as built\n"),
    ):
        give(text)
        assert specc(*arguments) == 0 and specc.out.startswith(start)
    give(text.replace('"heads"', '"haeds"'))
    assert specc("validate", "-") == 2 and specc.err.startswith("<stdin>:1:")
    assert specc("build", "-") == 2 and "can only be compared" in specc.err


def test_a_copy_of_a_spec_does_not_replace_what_the_spec_built(here: Path, specc: Shell) -> None:
    assert specc("build", "specs/tiny.yaml") == 0
    before = stamps(here / "generated")
    shutil.copy("specs/tiny.yaml", "specs/copy.yaml")
    assert specc("build", "specs/copy.yaml") == 2
    assert "generated/tiny was built from specs/tiny.yaml, and specs/copy.yaml has the same name" in specc.err
    assert stamps(here / "generated") == before
    assert specc("build", "specs/copy.yaml", "--force") == 0
    assert json.loads(Path("generated/tiny/manifest.json").read_text())["source"] == "specs/copy.yaml"
    assert specc("build", "specs/copy.yaml") == 0
    assert specc("build", "specs/tiny.yaml") == 2 and "was built from specs/copy.yaml" in specc.err


def test_generated_code_is_beside_the_specs(here: Path, specc: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy("specs/tiny.yaml", "alone.yaml")
    (here / "elsewhere").mkdir()
    for folder, spec, into in (
        ("elsewhere", "../specs/tiny.yaml", "generated"),
        ("specs", "tiny.yaml", "generated"),
        (".", "specs/tiny.yaml", "generated"),
        ("elsewhere", str(here / "specs/tiny.yaml"), "generated"),
    ):
        monkeypatch.chdir(here / folder)
        assert specc("build", spec) == 0
        assert (here / into / "tiny/manifest.json").is_file()
        assert specc("build", spec, "--check") == 0
        shutil.rmtree(here / into)
        assert sorted(path.name for path in here.iterdir()) == ["alone.yaml", "elsewhere", "specs"]
        assert not list((here / "elsewhere").iterdir()) and not (here / "specs/generated").exists()
    monkeypatch.chdir(here / "elsewhere")
    assert specc("build", "../alone.yaml", "--into", "here") == 0
    assert (here / "elsewhere/here/tiny/PLAN.md").is_file() and not (here / "generated").exists()


def test_a_full_disk_is_one_of_the_environment(here: Path, specc: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("specc.compiler.generated_folder.os.fsync", full)
        assert specc("build") == 3
    assert "No space left on device" in specc.err and "= help: free some space" in specc.err
    left = {path.name for path in Path("generated/tiny").rglob("*") if path.is_file()}
    assert left == set(), "nothing half-written"
    assert specc("build", "--check") == 1 and specc("build") == 0


def test_without_an_installation_there_is_one_clear_line(
    here: Path, specc: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    for arguments in (["--version"], ["build"]):
        assert specc(*arguments) == 3
        assert specc.err.startswith("error: E002 specc is not installed") and "pip install -e ." in specc.err
        assert "Traceback" not in specc.err
