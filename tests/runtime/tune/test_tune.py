"""The search for tiles: what is tried, what is kept when it is cut off, and what becomes of what fails."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tune_samples import MACHINE, fake_nvcc

from specc.compiler.build import compile_spec
from specc.compiler.plan.lock import NO_LOCK, read_lock
from specc.compiler.plan.plan import Plan
from specc.compiler.spec.check import load
from specc.runtime.errors import EnvironmentFailure
from specc.runtime.model.load import import_file
from specc.runtime.tune import report
from specc.runtime.tune.candidates import candidates
from specc.runtime.tune.journal import Journal
from specc.runtime.tune.measure import forget
from specc.runtime.tune.prepare import LONGEST, prepare, short
from specc.runtime.tune.search import NodeResult, TuneError, TuneOptions, tune

ROOT = Path(__file__).parents[3]
SPEC = ROOT / "specs/gpt_mini.yaml"
MAIN = "from specc.cli.app import main; main()"


def test_every_node_with_a_kernel_is_tuned_once_with_all_languages(plan: Plan) -> None:
    choices = plan.generated
    modules = [choice.rendered.module for choice in choices]
    assert len(set(modules)) == len(modules) and {"dgrad_mul__n448_k128"} < set(modules)
    for choice in choices:
        results = list(candidates(choice.site, plan.source))
        assert (
            len({candidate.label for candidate in results})
            == len(results)
            == len({candidate.digest for candidate in results})
        )
        if "n448" in choice.rendered.module:
            assert {candidate.kernel.language for candidate in results} == {"triton", "cutlass"}
            assert len({candidate.source for candidate in results if candidate.source}) < sum(
                candidate.source is not None for candidate in results
            )
        assert any(candidate.rendered.tile == choice.rendered.tile for candidate in results), (
            "what the rule picks is tried too"
        )


def test_a_search_that_was_cut_off_goes_on(cache: Path) -> None:
    journal = Journal(MACHINE, "site", 128)
    journal.add("a", 0.25)
    journal.add("b", "spills")
    (file,) = (cache / "tune").iterdir()
    with file.open("a") as half:
        half.write('\n{"candidate": "c", "res')
    again = Journal(MACHINE, "site", 128)
    assert again.results == {"a": 0.25, "b": "spills"}
    assert Journal(MACHINE, "site", 129).results == {} == Journal(MACHINE, "another", 128).results
    again.add("d", 0.5)
    assert Journal(MACHINE, "site", 128).results == {"a": 0.25, "b": "spills", "d": 0.5}
    noted = MACHINE.model_copy(update={"nvcc": "13.0.88"})  # which is in the key of what it compiles
    assert Journal(noted, "site", 128).results == {"a": 0.25, "b": "spills", "d": 0.5}
    again.forget()
    assert Journal(MACHINE, "site", 128).results == {} and not file.exists()


def test_a_candidate_that_does_not_compile_is_told_with_the_reason(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc(
        tmp_path,
        monkeypatch,
        "text = pathlib.Path(sys.argv[-3]).read_text()\n"
        "pathlib.Path(sys.argv[-1]).write_bytes(b'x')\n"
        "print('64 bytes spill stores' if 'spill' in text else '0 bytes spill stores')\n"
        "sys.exit('broken' in text)\n",
    )
    folders = []
    for i, text in enumerate(("good", "broken", "spill")):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "kernel.cu").write_text(f"int {text};\n")
        folders.append((i, folder))
    reasons = {done.index: done.reason for done in prepare(folders, "kernel", "kernel", None)}
    assert reasons[0] is None
    assert reasons[1] == "nvcc cannot compile kernel.cu (exit 1)"
    assert reasons[2] == "the kernel kernel.cu is slow: 64 bytes spill stores"


def test_a_candidate_is_forgotten_when_it_was_timed(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("value = 7\n")
    before = set(sys.modules)
    assert import_file(tmp_path, "kernel").value == 7 and set(sys.modules) > before
    forget(tmp_path)
    assert set(sys.modules) == before


def test_reasons_are_one_short_line() -> None:
    assert short("\n  first \nsecond") == "first" and len(short("x" * 999)) == LONGEST
    assert short("") == "unknown reason"


def test_the_cpu_has_nothing_to_tune(tmp_path: Path) -> None:
    spec, _ = load(SPEC)
    with pytest.raises(TuneError, match="but the target is cpu"):
        tune(TuneOptions(spec, "cpu", NO_LOCK, tmp_path / "lock.json"), print)
    with pytest.raises(TuneError, match="no node has 'typo' in its path") as error:
        tune(TuneOptions(spec, "sm90", NO_LOCK, tmp_path / "lock.json", only="typo"), print)
    labels = error.value.hint.removeprefix("nodes with a kernel: ").split(", ")
    assert "blocks.*.mlp.up + act" in labels and len(set(labels)) == len(labels)
    for only in ("attention", ""):  # for sm80 nothing is CUDA C++
        targets = spec.model_copy(update={"targets": ("sm80", "sm90")})
        options = TuneOptions(
            targets, "sm90" if only else "sm80", NO_LOCK, tmp_path / "lock.json", only=only, compile_only=True
        )
        with pytest.raises(TuneError, match="has no CUDA C") as error:
            tune(options, print)
        assert error.value.hint == (
            "nodes with CUDA C++ candidates: blocks.*.mlp.up + act, blocks.*.mlp.down.dgrad + act.grad"
            if only
            else "nodes with CUDA C++ candidates: none"
        )


def test_without_nvcc_nothing_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, _ = load(SPEC)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    for compile_only in (True, False):
        options = TuneOptions(spec, "sm90", NO_LOCK, tmp_path / "lock.json", only="mlp", compile_only=compile_only)
        with pytest.raises(EnvironmentFailure, match="nvcc"):
            tune(options, print)
    assert not (tmp_path / "lock.json").exists()


def test_a_report_has_times_first_and_then_reasons(plan: Plan) -> None:
    choice = plan.generated[0]
    fast, slow, bad = list(candidates(choice.site, plan.source))[:3]
    result = NodeResult("mlp.up", "linear", 1024, 0.25, {fast: 0.5, slow: 1.0}, {bad: "spills"})
    lines = report.text([result]).splitlines()
    assert lines[0] == "mlp.up (linear), 1,024 rows, floor 0.2500 ms"
    assert lines[1].split()[:3] == ["0.5000", "ms", "50%"] and lines[3] == f"  {bad.label}: spills"
    (data,) = json.loads(json.dumps(report.data([result])))
    assert [row["ms"] for row in data["candidates"]] == [0.5, 1.0, None]
    assert data["candidates"][2]["reason"] == "spills" and data["floor_ms"] == 0.25


@pytest.mark.gpu
def test_tune_writes_a_lock_that_build_follows(tmp_path: Path, cache: Path) -> None:
    path = Path(shutil.copy(SPEC, tmp_path))
    run = [sys.executable, "-c", MAIN, "tune", str(path), "--target", "sm90", "--only", "mlp.up"]
    done = subprocess.run([*run, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = {row["symbol"].partition("__")[0]: row["candidates"] for row in json.loads(done.stdout)}
    assert set(results) == {"linear_leaky_relu2", "linear_leaky_relu2_pre"}  # what keeps the derivative, and the input
    lock = read_lock(tmp_path / "gpt_mini.lock.json").targets["sm90"]
    assert lock.groups == {}, "the backward of neither way was measured"
    for name, tried in results.items():
        times = [row["ms"] for row in tried if row["ms"] is not None]
        assert len(times) > 10 and all(row["ms"] is not None or row["reason"] for row in tried)
        entry = lock.kernels[f"{name}__n448_k128"]
        assert entry.ms == pytest.approx(min(times), rel=0.2)
    plan = compile_spec(path, (), ("sm90",)).plans["sm90"]
    (choice,) = (c for c in plan.choices if c.measured is not None)
    entry = lock.kernels[choice.rendered.module]
    assert choice.site.key == entry.key and choice.kernel.name == entry.kernel
    again = subprocess.run(run, capture_output=True, text=True)
    assert "0 already measured" not in again.stderr and "already measured" in again.stderr
