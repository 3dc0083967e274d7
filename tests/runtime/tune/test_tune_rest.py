"""Times of library products and of the step are stored in the lock and shown in the plan."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from tune_samples import MACHINE

from specc.compiler.build import Planned, plan_spec
from specc.compiler.plan.lock import Lock, StepTiming, Timing, lock_path, read_lock
from specc.compiler.report.step import POINTWISE, REST
from specc.compiler.report.summary import Summary, lines
from specc.runtime.bench.profile import Kernel, Profile
from specc.runtime.bench.timing import Measured
from specc.runtime.tune import library_times as rest
from specc.runtime.tune.library_times import classes_of, library_rows, measure_rest

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """gpt_mlp35 with the tiles of its lock except those of attention, in a folder of its own."""
    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path / "cache"))
    lock = json.loads((ROOT / "specs/gpt_mlp35.lock.json").read_text())
    measured = lock["targets"]["sm90"]
    del measured["timings"], measured["step"]
    measured["kernels"] = {name: entry for name, entry in measured["kernels"].items() if "attention" not in name}
    (tmp_path / "gpt_mlp35.lock.json").write_text(json.dumps(lock))
    return Path(shutil.copy(ROOT / "specs/gpt_mlp35.yaml", tmp_path))


def summary_of(planned: Planned) -> Summary:
    return Summary(planned.spec, planned.plans, planned.deployed)


def measure(spec: Path, monkeypatch: pytest.MonkeyPatch, only: str = "") -> Lock:
    """Measures on a GPU that is none: a product takes a tenth of a millisecond, a step 600."""
    path, planned = lock_path(spec, "gpt_mlp35"), plan_spec(spec)
    machine = read_lock(path).targets["sm90"].machine

    def time_step(*given: object) -> StepTiming:
        step = summary_of(plan_spec(spec)).step
        classes = {POINTWISE: 98.0, REST: 25.0}
        return StepTiming(key=step.key, tokens=step.tokens, ms=600.0, memory=23_800_000_000, classes=classes)

    monkeypatch.setattr(rest, "time_row", lambda row, *given: Timing(node=row.node, rows=98_304, ms=0.1))
    monkeypatch.setattr(rest, "time_step", time_step)
    said: list[str] = []
    measure_rest(planned.spec, "sm90", path, machine, only, CPU, said.append)
    assert said
    return read_lock(path)


def test_library_products_and_the_step_go_into_the_lock(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_lock(lock_path(spec, "gpt_mlp35")).targets["sm90"]
    lock = measure(spec, monkeypatch).targets["sm90"]
    assert lock.kernels == before.kernels and lock.step is not None
    wgrad = "wgrad(bf16[B,T,512], bf16[B,T,1792]) : bf16[512,1792]"
    assert lock.timings[wgrad].node == "blocks.*.mlp.down.wgrad"
    planned = plan_spec(spec)
    assert not planned.lock_use.idle and planned.lock_use.entries == len(lock.kernels) + len(lock.timings) + 1
    summary = summary_of(planned)
    works = {work.name: work for work in summary.step.works}
    calls = sum(row.calls for row in works["library products"].rows)
    assert works["library products"].ms == pytest.approx(0.1 * calls)
    assert works[POINTWISE].ms == 98.0 and works[REST].ms == 25.0 and works["attention"].ms is None
    shown = "\n".join(lines(summary))
    assert ": 600 ms, floor 362; memory 23.8 GB at most" in shown and "attention                not measured" in shown


def test_the_time_of_another_step_is_not_taken(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(spec, monkeypatch)
    planned = plan_spec(spec, ("train.micro_batch=24",))
    assert summary_of(planned).step.timing is None and "sm90 step" in planned.lock_use.idle


@pytest.mark.parametrize(
    "override",
    [
        "fuse.4={head: [logits, softcap, loss], chunks: 8}",
        "train.optimizers.0.steps=4",
        "train.optimizers.3={kind: lion, match: '*', lr: 0.0025}",
        "train.average=null",
        "train.qat={below: 0.15}",
        "train.context=1024",
    ],
)
def test_what_changes_a_step_leaves_no_measured_time(override: str) -> None:
    assert summary_of(plan_spec(ROOT / "specs/gpt_mlp35.yaml", (override,))).step.timing is None


@pytest.mark.parametrize(
    "override", ["train.optimizers.0.lr=0.01", "train.seed=1", "train.context={at: [[0, 1024], [0.5, 2048]]}"]
)
def test_what_does_not_change_the_last_step_leaves_its_time(override: str) -> None:
    assert summary_of(plan_spec(ROOT / "specs/gpt_mlp35.yaml", (override,))).step.timing is not None


def test_a_step_has_rows_of_the_length_of_training() -> None:
    """A token attends to itself and all earlier tokens of its row. Products do not depend on the length of rows."""
    whole, short = (
        summary_of(plan_spec(ROOT / "specs/gpt_mlp35_base.yaml", overrides))
        for overrides in ((), ("train.context=256",))
    )
    works = [{work.name: work.flops for work in summary.step.works} for summary in (whole, short)]
    assert (
        works[1]["attention"] * 2049 == works[0]["attention"] * 257
        and works[1]["library products"] == works[0]["library products"]
    )
    assert short.step.tokens == whole.step.tokens and short.forward_flops < whole.forward_flops


def test_the_time_of_attention_is_of_its_own_length() -> None:
    def attention(*overrides: str) -> float | None:
        planned = plan_spec(ROOT / "specs/gpt_mlp35.yaml", overrides)
        return next(work.ms for work in summary_of(planned).step.works if work.name == "attention")

    assert attention() == pytest.approx(190.52, rel=0.01) == attention("train.micro_batch=24")
    assert attention("model.context=8192", "train.micro_batch=12") is attention("model.context=1024") is None


def test_the_classes_and_the_rest_add_up_to_the_step() -> None:
    summary = summary_of(plan_spec(ROOT / "specs/gpt_mlp35.yaml"))
    step, beyond = summary.step, summary.step.beyond_ms
    assert step.timing is not None and beyond is not None and 0 < beyond < 0.1 * step.timing.ms
    assert sum(work.ms or 0.0 for work in step.works) + beyond == pytest.approx(step.timing.ms)
    assert all(work.ms is not None and work.floor_ms < 1.02 * work.ms for work in step.works)  # of measured peak rates
    assert any(row.startswith("  beyond the sum") for row in lines(summary))


def test_stored_bits_do_not_change_the_step() -> None:
    planned = plan_spec(ROOT / "specs/gpt_mlp35.yaml", ("quant.default.bits=6",))
    assert summary_of(planned).step.timing is not None and not planned.lock_use.idle


def test_one_node_is_measured_without_a_step(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = measure(spec, monkeypatch, only="head.logits").targets["sm90"]
    head = {f"head.logits{suffix}" for suffix in ("", ".dgrad", ".wgrad")}
    # The product of q, k and v has the sizes of the head's.
    wanted = {f"blocks.*.attention.q_k_v{name.removeprefix('head.logits')} and {name}" for name in head}
    assert lock.step is None and {timing.node for timing in lock.timings.values()} == wanted


def test_the_library_is_timed_on_the_spec_s_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where the library is Torch: the call is the product of the row."""
    planned = plan_spec(ROOT / "specs/gpt_mini.yaml", ("train.micro_batch=1", "targets=[cpu]"))
    row = next(row for row in library_rows(summary_of(planned).step) if row.node.endswith("mlp.up.wgrad"))
    outputs: list[torch.Tensor] = []

    def alternate(calls: Mapping[str, Callable[[], object]], *given: object) -> dict[str, Measured]:
        result = calls["library"]()
        outputs.extend([result] if isinstance(result, torch.Tensor) else list(result))  # type: ignore[call-overload]
        return {"library": Measured.of([0.25], [0.25])}

    monkeypatch.setattr(rest, "alternate", alternate)
    timing = rest.time_row(row, planned.spec, CPU)
    assert timing.ms == 0.25 and timing.rows == planned.spec.model.window
    assert row.site is not None and [tuple(value.shape) for value in outputs] == [row.site.node.type.shape]


def test_a_profile_is_put_in_the_plan_s_classes() -> None:
    kernels = [("GEMM", 5.0), ("pointwise", 3.0), ("optimizer", 1.0), ("copy", 0.5)]
    profile = Profile(2, 12.0, 2.0, tuple(Kernel(kind, kind, ms, 1) for kind, ms in kernels))
    assert classes_of(profile) == {POINTWISE: 3.0, REST: 3.5}
    assert json.loads(MACHINE.model_dump_json())["gpu"]
