"""The output, the files and the comparisons of the compiler\'s commands."""

import io
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from cli_shell import ROOT, Shell, commands, stamps
from tiny_models import spec_data

from specc.cli import LAYERS, app
from specc.compiler.errors.codes import CODES
from specc.compiler.spec.check import load


def test_validate_takes_overrides(here: Path, specc: Shell) -> None:
    assert specc("validate", "specs/tiny.yaml", "--set", "train.steps=7") == 0
    assert specc("validate", "specs/tiny.yaml", "--set", "model.dim=-7") == 2
    assert "--set model.dim" in specc.err
    assert specc("validate", "specs/tiny.yaml", "--set", "model.dim") == 2 and "S014" in specc.err


@pytest.mark.parametrize(
    "command",
    ["validate", "plan", "verify", "migrate", "breaking --against main", "sweep", "size", "train --data stdlib --run"],
)
def test_an_empty_path_is_not_the_working_folder(here: Path, specc: Shell, command: str) -> None:
    assert specc(*command.split(), "") == 2
    assert "the path is empty" in specc.err


def test_validate_goes_as_far_as_a_build(here: Path, specc: Shell) -> None:
    Path("fuse.yaml").write_text(json.dumps(spec_data(fuse=({"blocks.*.nope": ["up", "act"]},))))
    assert specc("validate", "fuse.yaml") == 2
    assert "S302 the fusion point `blocks.*.nope` matches no part of the model" in specc.err


def test_plan_compares_with_what_is_on_disk(here: Path, specc: Shell) -> None:
    assert specc("plan", "specs/tiny.yaml") == 0
    line = specc.out.splitlines()[-1]
    assert re.fullmatch(r"files        \d+ new: PLAN.md, .* and \d+ more, in generated/tiny", line)
    assert not Path("generated").exists()
    assert specc("build") == 0
    before = stamps(here / "generated")
    assert specc("plan", "specs/tiny.yaml", "--diff") == 0
    assert specc.out.splitlines()[-1] == "files        up to date, in generated/tiny"
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
    assert specc.out == "1 spec: up to date\n"
    before = stamps(here / "generated")
    model = Path("generated/tiny/cpu/model.py")
    text = model.read_text()
    plan = Path("generated/tiny/PLAN.md")
    model.write_text(text.replace("Model(nn.Module)", "Other(nn.Module)"))
    plan.write_bytes(plan.read_bytes().replace(b"\n", b"\r\n"))
    Path("generated/tiny/manifest.json").unlink()
    Path("generated/tiny/cpu/linear_relu2__n12_k8.py").chmod(0o755)
    Path("generated/tiny/cpu/more.py").write_text("more = 1\n")
    Path("generated/gone").mkdir()
    edited = stamps(here / "generated")
    assert specc("build", "--all", "--check") == 1
    assert specc.out.splitlines() == [
        "generated/tiny/PLAN.md: line endings",
        "generated/tiny/cpu/linear_relu2__n12_k8.py: executable",
        "generated/tiny/cpu/model.py: changed",
        "generated/tiny/cpu/more.py: extra: no build writes it, so delete it",
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


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize("command", ["train x.yaml --max-seconds", "sweep x.yaml --max-seconds"])
def test_a_limit_is_finite(command: str, number: str, here: Path, specc: Shell) -> None:
    Path("x.yaml").touch()
    assert specc(*command.split(), number) == 2
    assert f"{number} is not a finite number" in specc.err


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "specs").glob("*.yaml")))
def test_a_plan_fits_on_a_screen(name: str, specc: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert specc("plan", f"specs/{name}.yaml") == 0
    lines = specc.out.splitlines()
    assert len(lines) <= 25 and all(len(line) <= 120 for line in lines)
    assert lines[-1] == f"files        up to date, in generated/{name}"


def test_plan_says_the_same_as_json(specc: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name, count in (("gpt_mini", 1_017_496), ("gpt_mlp35_base", 29_374_040), ("gpt2_124m", 123_532_032)):
        assert specc("plan", f"specs/{name}.yaml") == 0
        lines = specc.out.splitlines()
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


def test_schema_writes_and_checks(here: Path, specc: Shell) -> None:
    assert specc("schema") == 0
    text = specc.out
    assert json.loads(text)["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert specc("schema", "--write") == 0
    assert Path("specs/schema.json").read_text() == text
    assert specc("schema", "--check") == 0
    Path("specs/schema.json").write_text(text + "\n")
    assert specc("schema", "--check") == 1
    assert specc.out == "specs/schema.json: the schema is outdated; run specc schema --write\n"


def test_help_lists_every_command_by_the_first_paragraph_of_its_help() -> None:
    listed = list(commands(app.specc))
    for group, entry in listed:
        command = group.loaded(entry)
        assert entry.name == command.name
        assert entry.help == " ".join((command.help or "").split("\n\n")[0].split())
    modules = {module.rstrip("_") for module in LAYERS[LAYERS.index("build") : LAYERS.index("app")] if module != "data"}
    assert {entry.name for group, entry in listed if group is app.specc} == modules


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


def test_commands_name_what_was_given_by_mistake(here: Path, specc: Shell) -> None:
    assert specc("explain", "E0104") == 2 and "U001 there is no code E0104" in specc.err
    Path("unversioned.yaml").write_text("name: x\n")
    for arguments in ((), ("--check",)):
        assert specc("migrate", "unversioned.yaml", *arguments) == 2
        assert "S102 the spec needs the key `spec_version`" in specc.err and "current" not in specc.out
    assert (
        specc("build", "specs/tiny.yaml", "--check", "--force") == 2 and "--check and --diff write nothing" in specc.err
    )
    Path("run").mkdir()
    Path("run/spec.json").write_text("{}")
    assert specc("train", "run") == 2 and "specc train --run run --resume auto" in " ".join(specc.err.split())


def test_a_named_pipe_is_no_spec(here: Path, specc: Shell) -> None:
    os.mkfifo("pipe.yaml")
    assert specc("validate", "pipe.yaml") == 2
    assert "S001 this is a named pipe" in specc.err and "`-`" in specc.err


@pytest.mark.parametrize(("spec", "name"), [("gpt_mini", "pipe.txt"), ("poly_attn", "pipe")])
def test_a_named_pipe_is_no_data(spec: str, name: str, here: Path, specc: Shell) -> None:
    """Its reader would wait for a writer."""
    os.mkfifo(name)
    assert specc("train", str(ROOT / f"specs/{spec}.yaml"), "--data", name, "--run", "run", "--target", "cpu") == 2
    assert f"{name}: this is a named pipe" in specc.err and not Path("run").exists()


def test_a_spec_on_standard_input(here: Path, specc: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def give(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    text = Path("specs/tiny.yaml").read_text()
    assert specc("build") == 0
    for arguments, start in (
        (["validate", "-"], "<stdin>: ok\n"),
        (["plan", "-"], "tiny: "),
        (["build", "--check", "-"], "1 spec: up to date\n"),
        (["diff", "specs/tiny.yaml", "-"], "tiny -> tiny\n"),
        (["diff", "-", "specs/tiny.yaml"], "tiny -> tiny\n"),
    ):
        give(text)
        assert specc(*arguments) == 0 and specc.out.startswith(start)
    give(text.replace('"heads"', '"haeds"'))
    assert specc("validate", "-") == 2 and specc.err.startswith("<stdin>:1:")
    assert specc("build", "-") == 2 and "can only be compared" in specc.err
    give(text.replace('"tiny"', '"other"'))
    assert specc("diff", "specs/tiny.yaml", "-") == 1 and "+++ <stdin>" in specc.out
    assert specc("diff", "-", "-") == 2 and "only one of the specs" in specc.err


def test_a_copy_of_a_spec_does_not_replace_what_the_spec_built(here: Path, specc: Shell) -> None:
    assert specc("build", "specs/tiny.yaml") == 0
    before = stamps(here / "generated")
    shutil.copy("specs/tiny.yaml", "specs/copy.yaml")
    assert specc("build", "specs/copy.yaml") == 2
    assert "generated/tiny was built from specs/tiny.yaml, and specs/copy.yaml has the same `name`" in specc.err
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
