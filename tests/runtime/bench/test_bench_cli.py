"""`specc bench` as a user calls it: all parts in small on the CPU, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_samples import SPEC

from specc.cli import bench as bench_command
from specc.cli.app import run
from specc.compiler.pipeline import lower
from specc.compiler.programs.cost import flops_per_token
from specc.compiler.spec.check import load
from specc.runtime.bench import suite
from specc.runtime.bench.profile import ORDER
from specc.runtime.model.load import Loaded, instantiate

pytestmark = pytest.mark.usefixtures("short_passes")

SMALL = ("model.dim=32", "model.context=32", "model.blocks.count=2", "train.micro_batch=2", "train.tokens_per_step=128")
SETS = [word for text in (*SMALL, "train.schedule={}") for word in ("--set", text)]
MLP = ("--set", 'fuse=[{"blocks.*.mlp": [up, act, down]}]')


@pytest.fixture(scope="module")
def whole(short_passes: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The JSON of one run of all parts, and the picture that it wrote."""
    picture = tmp_path_factory.mktemp("bench") / "roofline.png"
    return bench(*MLP, "--steps", "2", "--picture", str(picture)), picture


def bench(*arguments: str) -> dict[str, Any]:
    """Returns the JSON that the command prints."""
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_command.click, "echo", lambda text, err=False: None if err else printed.append(text))
        assert run(["bench", str(SPEC), "--target", "cpu", *SETS, *arguments, "--json"]) == 0
    data: dict[str, Any] = json.loads("".join(printed))
    return data


def test_a_part_of_the_model_alone_and_figures_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specc.runtime.bench.variants.MODES", {})  # nothing that compiles
    command = ["bench", str(SPEC), "--target", "cpu", *SETS, "--only", "kernels", "--only", "groups", "--json"]
    assert run([*command, "--at", "head.l"]) == 0
    out, errors = capsys.readouterr()
    result = json.loads(out)
    assert [row["name"] for row in result["kernels"]] == ["head.logits", "head.loss + softcap", "head.logits.dgrad"]
    assert not result["groups"] and result["command"].endswith("--only groups --json --at head.l")
    for row in result["kernels"]:
        ours = row["times"].get("generated") or row["times"]["library"]
        assert f"  {row['name']}: {ours['ms']:.4g} ms" in errors
    assert run([*command, "--at", "hed"]) == 4
    assert "no kernel or group has hed in its name\n" in (said := capsys.readouterr().err) and "head.logits" in said
    assert "ceilings" not in said, "a typo is found before anything is measured"
    assert run([*command[:-5], "--only", "groups", "--at", "head.l"]) == 4
    assert "the names are: blocks.*" in capsys.readouterr().err
    assert run([*command[:-5], "--set", "fuse=[]", "--only", "groups"]) == 0, "nothing was asked for by name"
    capsys.readouterr()
    assert run([*command, "--at", "head.l", "--picture", str(tmp_path)]) == 2
    assert "is a directory" in (said := capsys.readouterr().err) and "ceilings" not in said


def test_the_parts_are_those_of_the_suite() -> None:
    assert bench_command.PARTS == suite.PARTS


def test_the_facts_of_the_run(whole: tuple[dict[str, Any], Path]) -> None:
    data = whole[0]
    assert (data["spec"], data["target"], data["sizes"]) == ("gpt_mini", "cpu", {"B": 2, "T": 32, "S": 32})
    assert data["machine"]["torch"] == torch.__version__ and data["machine"]["driver"] == "none"
    assert data["machine"]["nvcc"] is data["machine"]["cutlass"] is None  # no kernel of a CPU's plan wants them
    assert data["command"].startswith("specc bench ") and "--set model.dim=32" in data["command"]
    assert list(data["left_out"]) == ["max_autotune", "profile"]
    for name in ("gemm", "copy", "read"):
        assert data["ceilings"][name]["ms"] > 0 and data["ceilings"][name]["spread"] >= 0


def test_kernels_and_groups(whole: tuple[dict[str, Any], Path]) -> None:
    data = whole[0]
    rows = {row["name"]: row for row in data["kernels"]}
    # 112 hidden of 32 features, 64 rows
    up = rows["blocks.*.mlp.up + act"]
    assert up["flops"] == 2 * 64 * 112 * 32 and up["bytes"] == 4 * (64 * 32 + 112 * 32 + 2 * 64 * 112)
    assert up["language"] == "torch" and list(up["times"]) == ["generated", "eager", "compile", "library"]
    assert up["accuracy"]["generated"] < 1e-5 and up["accuracy"]["exact"] == "float64" and up["failed"] == {}
    down = rows["blocks.*.mlp.down"]
    assert down["kernel"] == "library" and list(down["times"]) == ["library"] and down["accuracy"] is None
    groups = {row["name"]: row for row in data["groups"]}
    assert list(groups) == ["blocks.*.mlp, forward", "blocks.*.mlp, forward + backward"]
    assert [row["flops"] for row in groups.values()] == [2 * up["flops"], 6 * up["flops"]]
    for row in (*rows.values(), *groups.values()):
        ceilings, times = data["ceilings"], {name: figures["ms"] for name, figures in row["times"].items()}
        assert row["bytes_written"] > row["bytes"] / 16  # else it would be held to reading
        floors = row["flops"] / ceilings["flops_per_second"], row["bytes"] / ceilings["bytes_per_second"]
        assert row["floor_ms"] == pytest.approx(1e3 * max(floors))
        assert row["bound"] == ("FLOPs" if floors[0] > floors[1] else "bytes")
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / (times.get("generated") or times["library"]))
        for name, ratio in row["ratio"].items():
            known = "generated" in times and name in times
            assert ratio == (pytest.approx(times["generated"] / times[name]) if known else None)


def test_a_loss_is_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specc.runtime.bench.variants.MODES", {})  # nothing that compiles
    data = bench("--set", "fuse=[{head: [logits, softcap, loss]}]", "--only", "kernels", "--only", "groups")
    rows = {row["name"]: row for row in data["kernels"]}
    loss = rows["head.loss + softcap"]
    assert list(loss["times"]) == ["generated", "eager"] and loss["accuracy"]["generated"] < 1e-5
    assert loss["bytes"] == 4 * (2 * 64 * 320 + 1) + 8 * 64  # logits and their gradient, padded; loss; targets
    floors = data["ceilings"]
    assert loss["bytes_written"] == 4 * (64 * 320 + 1)
    seconds = max(loss["bytes"] / floors["bytes_per_second"], loss["flops"] / floors["flops_per_second"])
    assert loss["floor_ms"] == pytest.approx(1e3 * seconds)
    names = [row["name"] for row in data["groups"]]  # nobody takes the gradient of a score: it is a kernel alone
    assert names == ["head in train, forward", "head in train, forward + backward"]
    assert data["step"] is None


def test_the_step(whole: tuple[dict[str, Any], Path]) -> None:
    step = whole[0]["step"]
    assert list(step) == ["fused", "fuse: []"]
    spec, _ = load(SPEC, (*SMALL, "train.schedule={}"))
    flops = 3 * flops_per_token(lower(spec, "cpu"), 32)
    for build in step.values():
        assert build["steps"] == 2 and build["tokens"] == 128
        assert build["tokens_per_second"] == pytest.approx(128e3 / build["step"]["ms"])
        assert build["model_flops_per_second"] == pytest.approx(flops * build["tokens_per_second"])
        assert build["ratio"] == pytest.approx(build["step"]["ms"] / step["fuse: []"]["step"]["ms"])
        assert build["peak_bytes"] is None and build["profile"] is None
        assert build["start_seconds"] > build["compile_seconds"] >= 0
    # the same function of the same weights and tokens, six steps long
    assert step["fused"]["loss"] == pytest.approx(step["fuse: []"]["loss"], rel=1e-3)
    assert step["fused"]["loss"] < 7


def test_the_picture(whole: tuple[dict[str, Any], Path]) -> None:
    from matplotlib.image import imread

    content = whole[1].read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    pixels = imread(str(whole[1]))
    assert pixels.shape[:2] == (900, 1500) and pixels[:, :, :3].std() > 0.05


def test_a_report_is_drawn_again(
    whole: tuple[dict[str, Any], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, again = tmp_path / "report.json", tmp_path / "again.png"
    committed = SPEC.parents[1] / "benchmarks" / "roofline.json"
    assert run(["bench", str(committed), "--picture", str(again)]) == 0
    assert again.read_bytes().startswith(b"\x89PNG")
    report.write_text(json.dumps(whole[0]))
    assert run(["bench", str(report)]) == 2
    assert "is a report, not a spec; add --picture FILE" in capsys.readouterr().err
    assert run(["bench", str(report), "--picture", str(again)]) == 0
    assert again.read_bytes() == whole[1].read_bytes()
    content = report.read_text()
    assert run(["bench", str(report), "--picture", str(report)]) == 2 and report.read_text() == content
    assert "use a name that ends in .png" in capsys.readouterr().err
    report.write_text(json.dumps(whole[0] | {"kernels": [], "groups": []}))
    assert run(["bench", str(report), "--picture", str(again)]) == 2
    assert "not a report of kernels or groups" in capsys.readouterr().err


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", str(SPEC), "--target", "cpu", *SETS, "--only", "step", "--steps", "1"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert max(map(len, lines)) <= 120 or max(lines, key=len) == lines[0]  # the command is as long as it was
    assert any(line.startswith("step of 128 tokens") for line in lines)
    assert [line.split()[0] for line in lines if line.startswith("fuse")] == ["fused", "fuse:"]
    assert not any(line.startswith(("kernels", "groups")) for line in lines)
    assert "step, fused: builds and compiles" in shown.err


def spoiled(change: Callable[[Any], Any], patch: pytest.MonkeyPatch) -> Callable[..., Loaded]:
    """`instantiate`, with the outputs of one kernel of the fused build changed while `patch` applies."""

    def instance(*args: Any, **words: Any) -> Loaded:
        loaded = instantiate(*args, **words)
        module = vars(suite.source_of(loaded))
        if (right := module.get("dgrad_mul")) is not None:
            patch.setitem(module, "dgrad_mul", lambda *given: change(right(*given)))
        return loaded

    return instance


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("kernels", torch.empty_like, "output 0 has a wrong shape, NaN or infinity: it is incomplete or wrong"),
        ("groups", lambda dx: 1.001 * dx, "error: R001 group blocks.*.mlp: output 1 is off by"),
    ],
)
def test_a_wrong_kernel_gets_no_time(
    part: str,
    change: Callable[[Any], Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(suite, "instantiate", spoiled(change, monkeypatch))
    monkeypatch.setattr("specc.runtime.bench.variants.MODES", {})  # nothing that compiles
    assert run(["bench", str(SPEC), "--target", "cpu", *SETS, "--only", part]) == 4
    shown = capsys.readouterr()
    assert words in shown.err and "Traceback" not in shown.err and not shown.out


def test_what_cannot_be(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", str(SPEC), *SETS]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run([*command, "--target", "sm90"]) == 3
    assert "sm90 needs a GPU of H100, H200" in capsys.readouterr().err
    assert run([*command, "--target", "sm80"]) == 2  # not one of the spec's
    assert run([*command, "--only", "step", "--picture", "x.png"]) == 2
    assert "--picture draws kernels and groups" in capsys.readouterr().err
    assert run([*command, "--only", "nothing"]) == 2
    assert run([*command, "--picture", "nowhere/x.png"]) == 2
    assert "there is no folder nowhere" in capsys.readouterr().err
    monkeypatch.setattr("specc.runtime.pictures.find_spec", lambda name: None)
    assert run([*command, "--target", "cpu", "--picture", "x.png"]) == 3
    assert "pip install 'specc[bench]'" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.timeout(600)  # it compiles several models, and other tests share the processors
def test_all_of_it_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = "sm90" if torch.cuda.get_device_capability()[0] == 9 else "sm80"
    picture = tmp_path / "roofline.png"
    small = [
        word
        for text in ("model.blocks.count=2", "train.micro_batch=64", "train.tokens_per_step=32768")
        for word in ("--set", text)
    ]
    arguments = [
        "bench",
        str(SPEC),
        "--set",
        f"targets=[{target}, cpu]",
        "--target",
        target,
        *small,
        *("--batch", "1", "--context", "128"),
        "--steps",
        "4",
        "--picture",
        str(picture),
        "--json",
    ]
    code, printed = run(arguments), capsys.readouterr()
    assert code == 0, printed.err
    data = json.loads(printed.out)
    assert data["left_out"] == {} and data["machine"]["driver"] not in ("none", "unknown")
    generated = [row for row in data["kernels"] if row["kernel"] != "library"]
    for row in (*generated, *data["groups"]):
        assert row["failed"] == {}, row["name"]
        assert {"generated", "eager", "compile", "max_autotune"} <= set(row["times"])
        assert row["accuracy"]["generated"] < 0.01 and row["share_of_floor"] > 0
    for name, build in data["step"].items():
        seen = build["profile"]
        assert set(seen["classes"]) <= set(ORDER)
        assert {"GEMM", "attention", "pointwise", "optimizer"} <= set(seen["classes"])
        assert ("fused" in seen["classes"]) == (name == "fused")
        busy = sum(kernel["ms"] for kernel in seen["classes"].values())
        assert busy >= seen["wall_ms"] - seen["idle_ms"] - 1e-4 and 0 <= seen["idle_ms"] < seen["wall_ms"]
        # Newton-Schulz: bf16 products that the optimizer launched
        assert any(kernel["kind"] == "optimizer" and "multi_tensor" not in kernel["name"] for kernel in seen["kernels"])
        assert build["peak_bytes"] > 0 and build["compile_seconds"] < build["start_seconds"]
    assert picture.read_bytes().startswith(b"\x89PNG")
