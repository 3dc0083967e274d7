"""The script that compute-sanitizer runs launches every kernel, and a wrong kernel ends it with an error."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import launch_kernels
import pytest
from attention_sites import attention_site
from gpus import gpu_target
from kernel_sites import make_site
from tiers import Trials, soak

from specc.compiler.build import compile_spec, kernel_files
from specc.compiler.kernels.attention.short import SHORT_CAUSAL
from specc.compiler.kernels.gemm.evt import GEMM_EVT
from specc.compiler.kernels.gemm.triton import LINEAR_TRITON
from specc.compiler.kernels.kernel import Kernel, Site
from specc.runtime.verify import judge as judging

SPEC = Path(__file__).parents[2] / "specs/gpt_mini.yaml"


def test_few_rows_and_many_are_launched(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(judging, "multiprocessors", lambda device: 1)
    assert launch_kernels.main([str(SPEC), "cpu", "--without", "norm_rotary"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = {line.split(" ")[0].partition("__")[0] for line in lines}
    assert names == {"linear_leaky_relu2", "dgrad_mul", "softmax_loss_tanh", "softmax_nats_tanh"}
    assert len(lines) == 4 * (launch_kernels.FEW + 1) and "[1, 343, 128]" in lines[3]
    assert launch_kernels.main([str(SPEC), "cpu", "--without", "norm_rotary", "--tiles", "0"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4 * launch_kernels.FEW


def test_kernels_of_artifacts_are_launched(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch_kernels.main([str(SPEC.with_name("poly_attn.yaml")), "cpu", "--deployed"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = {line.split(" ")[0] for line in lines}
    assert {"int8_lstm_step", "int8_linear_f32"} <= {name.partition("__")[0] for name in names}
    assert len(lines) == len(names) * launch_kernels.FEW
    with pytest.raises(SystemExit, match="deploys what it trains"):
        launch_kernels.main([str(SPEC), "cpu", "--deployed"])


def test_the_tools_look_at_the_kernels_of_the_plan_and_no_other() -> None:
    def names(kernel: Kernel, site: Site) -> tuple[str, ...]:
        return launch_kernels.kernel_names(list(kernel_files(kernel.render(site), "", "").values()))

    cutlass = ("cutlass13device_kernel", "cutlass7Kernel2INS_4gemm")
    assert names(GEMM_EVT, make_site("gelu")) == cutlass
    assert names(LINEAR_TRITON, make_site("gelu")) == ("linear_gelu_kernel",)
    assert names(SHORT_CAUSAL, attention_site(context=30)) == ("causal_attention_kernel",)
    results = {
        (choice.kernel.language, *names(variant, choice.site))
        for name in ("gpt2_124m", "gpt_mini", "poly_transformer")
        for choice in compile_spec(SPEC.with_name(f"{name}.yaml"), (), ("sm90",)).plans["sm90"].choices
        for variant in choice.kernel.variants(choice.site) or (choice.kernel,)
        if choice.rendered.function and choice.kernel.language in ("triton", "cuda", "cutlass")
    }
    assert len(results) > 8 and all(rest for _, *rest in results), results
    assert {rest for language, *rest in results if language == "cutlass" for rest in [tuple(rest)]} == {cutlass}


SCRIPT = """\
import os, sys
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
tool = sys.argv[sys.argv.index("--tool") + 1]
print("launched", *sys.argv[1:])
print("========= " + {"racecheck": "RACECHECK SUMMARY: %d hazards displayed (0 errors, 0 warnings)"}.get(
    tool, "ERROR SUMMARY: %d errors") % RACES[tool])
sys.exit(CODE)
"""


@pytest.mark.parametrize(
    ("races", "code", "last", "status"),
    [
        (0, 0, "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings); the script ends with 0", 0),
        (3, 0, "RACECHECK SUMMARY: 3 hazards displayed (0 errors, 0 warnings); the script ends with 0", 1),
        (0, 1, "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings); the script ends with 1", 1),
        (None, 0, "no summary; the script ends with 1", 1),
    ],
)
def test_what_the_tools_find_is_summed_up(
    races: int | None,
    code: int,
    last: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    tool = tmp_path / "compute-sanitizer"
    body = SCRIPT.replace("RACES", str({"memcheck": 0} | ({} if races is None else {"racecheck": races})))
    tool.write_text(f"#!{sys.executable}\n{body.replace('CODE', str(code))}")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    tools = ["--sanitize", "memcheck", "racecheck"]
    assert launch_kernels.main([str(SPEC), "sm90", "--without", "attention", *tools]) == status
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1] == f"racecheck: {last}" and lines[-2].startswith("memcheck: ERROR SUMMARY: 0 errors; ")
    ran = next(line for line in lines if line.startswith("launched"))
    assert "--kernel-name kns=" in ran and "kns=cutlass13device_kernel" in ran and "kns=norm_rotary_kernel" in ran
    assert ran.endswith(f"launch_kernels.py {SPEC} sm90 --without attention --tiles 1")


@pytest.mark.gpu
@soak("C14", shapes_of_each_kernel=10)
def test_no_tool_reports_a_kernel(trials: Trials) -> None:
    """All tools of compute-sanitizer, over the kernels of these specs and those of int8 artifacts."""
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not installed")
    shapes = ["--shapes", str(trials["shapes_of_each_kernel"]), "--sanitize"]
    cases: dict[str, tuple[str, ...]] = dict.fromkeys(
        ("gpt_mlp35_base", "gpt_mini", "poly_transformer", "nanochat_d12"), ()
    )
    cases["poly_attn"] = ("--deployed",)

    def status(name: str, words: Sequence[str]) -> int:
        path = str(SPEC.with_name(f"{name}.yaml"))
        command = [sys.executable, launch_kernels.__file__, path, gpu_target(), *words, *shapes]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(done.stdout)
        return done.returncode

    with ThreadPoolExecutor() as pool:
        assert dict(zip(cases, pool.map(status, cases, cases.values()), strict=True)) == dict.fromkeys(cases, 0)
