"""Several processes train as one: against one process, from inside (world_scenes.py) and by the command."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import world_scenes
from command_server import folder_of_specc
from log_lines import read_log, read_start
from ranks import environment, outputs
from run_samples import SPEC, write_text
from safetensors.torch import load_file
from started_runs import MAIN, SPECC, arguments, ended, started

from specc.cli.app import run
from specc.runtime.distributed import launch
from specc.runtime.distributed.world import World
from specc.runtime.errors import EnvironmentFailure
from specc.runtime.storage import checkpoint

# f32 sums over windows in another order; Muon's iterations grow the difference. Seen after 12 steps: 1e-7 and 6e-6.
LOSS, WEIGHT = 2e-6, 1e-4


def losses(run: Path) -> list[float]:
    records = [record for record in read_log(run / "log.jsonl") if record["event"] == "step"]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def assert_same_end(first: Path, other: Path) -> None:
    """Curves, validation, weights, average and optimizer agree to f32 rounding."""
    assert losses(other) == pytest.approx(losses(first), rel=LOSS)
    result, wanted = (
        {(r["step"], r["weights"], r["tokens"]): r["nats"] for r in read_log(path / "log.jsonl") if "nats" in r}
        for path in (other, first)
    )
    assert len(wanted) == 4  # at 5, 10 and twice at the end; a run that was ended early has more
    assert {key: result.get(key) for key in wanted} == pytest.approx(wanted, rel=LOSS)
    for file in ("model", "ema", "optimizer"):
        ours, yours = (load_file(path / f"checkpoints/step_00000012/{file}.safetensors") for path in (first, other))
        assert ours.keys() == yours.keys()
        for name, tensor in ours.items():
            assert float((tensor - yours[name]).norm()) <= WEIGHT * float(tensor.norm()), (file, name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `data` and a run `one` of one process."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(arguments(folder, "one")) == 0
    return folder


@pytest.mark.usefixtures("forked_ranks")
def test_two_processes_then_one_are_as_one(whole: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(arguments(whole, "two", "--target", "cpu", "--gpus", "2", "--steps", "7")) == 0
    shown = capfd.readouterr()
    assert shown.err.count("run: ") == shown.err.count("step 7  loss") == shown.out.count("7 steps in") == 1
    assert read_start(whole / "two" / "log.jsonl")["processes"] == 2
    assert run(arguments(whole, "two", "--resume", "auto")) == 0
    assert_same_end(whole / "one", whole / "two")


@pytest.mark.usefixtures("forked_ranks")
def test_masters_in_bf16_are_rounded_the_same_on_all_ranks(whole: Path) -> None:
    """Weights that differ at a validation would end the run."""
    precision = ("--set", "train.precision={compute: bf16, masters: bf16}")
    assert run(arguments(whole, "rounded", "--target", "cpu", "--gpus", "2", *precision)) == 0
    assert losses(whole / "rounded") == pytest.approx(losses(whole / "one"), rel=0.02)
    weights = load_file(whole / "rounded/checkpoints/step_00000012/model.safetensors")
    matrices = [tensor for tensor in weights.values() if tensor.ndim == 2]
    assert matrices and all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in matrices)


def test_one_process_then_torchrun_are_as_one(whole: Path) -> None:
    """Started by hand. Without the `--`, torchrun takes `--run` for an option of its own."""
    assert run(arguments(whole, "hand", "--steps", "4")) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = whole / "specc"  # as the one that an installation makes
    script.write_text(MAIN)
    command = [*torchrun, "--", str(script), *arguments(whole, "hand", "--target", "cpu", "--resume", "auto")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("resuming after step 4") == 1 and done.stdout.count("12 steps in") == 1
    assert_same_end(whole / "one", whole / "hand")


@pytest.mark.usefixtures("forked_ranks")
def test_options_of_torchrun_give_the_same_run(whole: Path, capfd: pytest.CaptureFixture[str]) -> None:
    more = ("--target", "cpu", "--gpus", "2", "--", "--max-restarts", "0", "--monitor-interval", "0.1")
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)]
    assert run(arguments(whole, "options", *more)) == 0
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)]
    shown = capfd.readouterr()
    assert shown.err.count("step 12  loss") == shown.out.count("12 steps in") == 1
    assert_same_end(whole / "one", whole / "options")


@pytest.mark.usefixtures("forked_ranks")
def test_one_error_is_shown_and_torchrun_keeps_its_exit_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Both ranks fail alike: torchrun would end with 1 and show each failure with a traceback."""
    odd = ("--set", "train.tokens_per_step=384", "--target", "cpu", "--gpus", "2")
    for options in ((), ("--", "--max-restarts", "0")):
        assert run(arguments(tmp_path, "run", *odd, *options)) == 2
        shown = capfd.readouterr().err
        assert shown.count("error: ") == 1 and "is not a multiple of micro_batch" in shown
        assert "Traceback" not in shown and "torch" not in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpus", "2", "--", "--nnodes", "two"), "torchrun does not accept the options after `--`: "),
        (("--gpus", "2", "--", "--none"), "torchrun does not accept the options after `--`: "),
        (("--", "--nnodes", "2"), "options of torchrun after `--` need --gpus N"),
    ],
)
def test_wrong_options_of_torchrun(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert run(arguments(tmp_path, "run", "--target", "cpu", *options)) == 2
    assert message in " ".join(capfd.readouterr().err.split())


def test_two_hands_of_torchrun_join(whole: Path) -> None:
    """One process on each of two `machines`, which meet at one endpoint."""
    with launch._reserved_port() as port:
        pass
    meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "x"]
    words = arguments(whole, "machines", "--target", "cpu", "--gpus", "1")
    command = [str(folder_of_specc() / "specc"), *words, "--", *meeting]
    lo = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    machines = [subprocess.Popen(command, env=lo, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [machine.communicate(timeout=300)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert sorted(text.count("step 12  loss") for text in said) == [0, 1]
    assert_same_end(whole / "one", whole / "machines")


def test_lines_of_other_ranks_begin_with_their_rank() -> None:
    text = (
        "import sys\nfrom specc.cli.output import keep_going\nkeep_going()\n"
        "sys.stderr.write('one\\ntwo ')\nsys.stderr.flush()\nprint('lines\\nthree', file=sys.stderr)"
    )
    shown = {}
    for rank in ("0", "3"):
        place = environment(RANK=rank, WORLD_SIZE="4")
        shown[rank] = subprocess.run([sys.executable, "-c", text], env=place, capture_output=True, text=True).stderr
    assert shown["0"] == "one\ntwo lines\nthree\n"
    assert shown["3"] == "[rank 3] one\n[rank 3] two lines\n[rank 3] three\n"


linux = pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")


@linux
def test_the_death_of_one_ends_all(tmp_path: Path) -> None:
    with started(tmp_path) as (process, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        code, shown = ended(process, ranks)
    assert code == 4 and "Traceback" not in shown
    assert shown.count("error:") == shown.count("error: rank 1 of 2 was ended by signal 9 (Killed)") == 1


@linux
@pytest.mark.parametrize(("number", "to_launcher", "code"), [(signal.SIGTERM, False, 75), (signal.SIGINT, True, 130)])
def test_signals_save_on_all_and_the_run_goes_on(
    tmp_path: Path, number: signal.Signals, to_launcher: bool, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM comes to rank 1 alone; Ctrl-C to the command."""
    with started(tmp_path) as (process, ranks):
        os.kill(process.pid if to_launcher else ranks[1], number)
        result, shown = ended(process, ranks)
    assert result == code and "Traceback" not in shown and shown.count("saved as") == 1
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints", print)
    assert newest is not None and str(newest) in shown
    before = losses(tmp_path / "run")
    assert checkpoint.read_state(newest).step == len(before)
    more = ("--resume", "auto", "--steps", str(len(before) + 2))
    assert run(arguments(tmp_path, "run", *more, steps=100_000)) == 0
    assert losses(tmp_path / "run")[:-2] == before


@linux
def test_a_killed_launcher_leaves_no_rank(tmp_path: Path) -> None:
    with started(tmp_path) as (process, ranks):
        process.kill()
        until = time.monotonic() + 60
        while any(Path(f"/proc/{rank}/exe").exists() for rank in ranks):  # a zombie has none
            assert time.monotonic() < until
            time.sleep(0.05)
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints", print)
    assert newest is not None and checkpoint.read_state(newest).step >= 3  # they got SIGTERM, and saved


@pytest.mark.parametrize("gpus", [0, 1])
def test_more_processes_than_gpus_are_an_environment_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], gpus: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert run(arguments(tmp_path, "run", "--gpus", "2")) == 3
    shown = capfd.readouterr().err
    assert f"--gpus 2 needs 2 NVIDIA GPUs, and torch finds {gpus}" in shown and "--target cpu" in shown
    assert run(arguments(tmp_path, "run", "--gpus", "2", "--target", "sm80")) == 2
    assert not (tmp_path / "run").exists()


def test_the_cpu_is_not_taken_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = type("Spec", (), {"name": "x", "targets": ("cpu",)})()
    with pytest.raises(EnvironmentFailure, match="no target of x runs on the GPUs"):
        launch.target_of(spec, None, 2)
    assert launch.target_of(spec, None, None) == launch.target_of(spec, "cpu", 2) == "cpu"


def test_an_environment_that_is_not_whole_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(arguments(tmp_path, "run")) == 3
    assert "a variable of torchrun is missing or invalid: 'LOCAL_RANK'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("codes", "came", "outcome", "words"),
    [
        ([(0, 0), (1, 0)], [], 0, ""),
        ([(1, 75), (0, 75)], [15], 75, ""),
        ([(0, launch.PEER_LOST), (1, 5)], [], 5, ""),  # the cause, not the first to end
        ([(0, launch.PEER_LOST), (1, launch.PEER_LOST)], [], 4, ""),
        ([(1, launch.PEER_LOST), (0, -9)], [], 4, "rank 0 of 2 was ended by signal 9 (Killed)"),
        ([(0, -11)], [15], 4, "rank 0 of 2 was ended by signal 11 (Segmentation fault)"),  # rank 1 hung
        ([(1, -15), (0, -15)], [15], 75, ""),  # before Python ran
        ([(1, -1), (0, -1)], [1], 75, ""),
        ([(1, -2), (0, -2)], [2], 130, ""),
    ],
)
def test_the_exit_code_is_that_of_the_cause(
    codes: list[tuple[int, int]], came: list[int], outcome: int, words: str
) -> None:
    said: list[str] = []
    assert launch._outcome(codes, 2, came, said.append) == outcome
    assert words in "".join(said) and bool(said) == bool(words)


Scenes = dict[str, Any]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Scenes], list[tuple[int, str]]]:
    """The folder, what each of two ranks saw, and each one's exit code and last words."""
    folder = tmp_path_factory.mktemp("scenes")
    ended = outputs("world_scenes.py", 2, folder, str(folder))
    for _, out, err in ended:
        assert out.startswith("{"), err
    return folder, [json.loads(out) for _, out, _ in ended], [(code, err) for code, _, err in ended]


Seen = tuple[Path, list[Scenes], list[tuple[int, str]]]


def test_calls_give_all_ranks_the_same(scenes: Seen) -> None:
    rank_0, rank_1 = (seen["calls"] for seen in scenes[1])
    assert (rank_0.pop("went_second"), rank_1.pop("went_second")) == (False, True)
    assert rank_0 == rank_1 == {"add": [1, 3, 5], "totals": [2, 2], "most": [1, 0, 0.25], "first": "by 0"}


def test_a_step_is_that_of_one_process(scenes: Seen) -> None:
    rank_0, rank_1 = (seen["gradients"] for seen in scenes[1])
    alone = world_scenes.gradients(scenes[0], World.alone())
    assert rank_0 == rank_1 and (alone.pop("micro_batches"), rank_0.pop("micro_batches")) == (4, 2)
    assert rank_0["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert rank_0["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    assert rank_0["sums"].keys() == alone["sums"].keys()
    for name, wanted in alone["sums"].items():
        assert rank_0["sums"][name] == pytest.approx(wanted, rel=1e-4, abs=1e-4), name


def test_validation_is_that_of_one_process(scenes: Seen) -> None:
    rank_0, rank_1 = (seen["scores"]["scores"] for seen in scenes[1])
    alone = world_scenes.scores(scenes[0], World.alone())["scores"]
    assert rank_0 == rank_1
    for score, wanted in zip(rank_0, alone, strict=True):
        assert score[1:] == wanted[1:] and score[0] == pytest.approx(wanted[0], rel=1e-6)


def test_the_clock_is_that_of_rank_0(scenes: Seen) -> None:
    rank_0, rank_1 = (seen["clocks"] for seen in scenes[1])
    assert rank_0["step"] == rank_1["step"] == 30
    wanted = [1.0] * 20 + [max((0.295 - 0.01 * step) / 0.1, 0.0) for step in range(20, 30)]
    assert rank_0["multipliers"] == rank_1["multipliers"] == pytest.approx(wanted)


def test_all_end_at_the_same_step(scenes: Seen) -> None:
    rank_0, rank_1 = (seen["ends"] for seen in scenes[1])
    assert rank_0 == rank_1 and 1 <= rank_0["step"] < 2000 and not rank_0["complete"]


def test_a_signal_to_one_stops_all_with_a_checkpoint(scenes: Seen) -> None:
    """Within validation too, where each rank has its own part to score."""
    rank_0, rank_1 = (seen["stops"]["stops"] for seen in scenes[1])
    assert rank_0 == rank_1 and [name for name, _ in rank_0] == ["step_00000005", "step_00000007"]
    assert all(name in hint for name, hint in rank_0)


def test_what_is_not_finite_on_one_rank_stops_all(scenes: Seen) -> None:
    rank_0, rank_1 = (seen["reports"]["failure"] for seen in scenes[1])
    assert rank_0 == rank_1 and rank_0.startswith("step 4: the loss is nan")


def test_an_overflow_on_one_rank_skips_the_step_on_all(scenes: Seen) -> None:
    rank_0, rank_1 = (seen["skips"]["skips"] for seen in scenes[1])
    assert rank_0 == rank_1 == [[1, None, 64.0], [2, None, 64.0], [3, True, 64.0], [4, None, 32.0]]


def test_ranks_that_differ_are_an_error(scenes: Seen) -> None:
    rank_0, rank_1 = (seen["differs"] for seen in scenes[1])
    assert not rank_0 and rank_1["differs"] == "the weight of rank 1 differs from that of rank 0: blocks.up"


def require_exact(seen: Scenes) -> None:
    resumed = seen["resumed"]
    assert sorted(stop for stop, *_ in resumed) == list(range(1, world_scenes.STOPS + 1))
    assert [entry for entry in resumed if entry[1:] != [True, True, world_scenes.AFTER]] == []
    assert seen["different"] == world_scenes.STOPS + world_scenes.AFTER  # else the test could not fail
    assert seen["samples"] > world_scenes.STOPS + world_scenes.AFTER


def test_a_run_of_two_processes_resumes_bit_by_bit_after_20_stops(scenes: Seen) -> None:
    """The next 50 losses and the samples of each rank are those of the run that never stopped."""
    rank_0, rank_1 = (seen["resumes"] for seen in scenes[1])
    require_exact(rank_0)
    require_exact(rank_1)


def test_a_run_of_one_process_resumes_bit_by_bit_after_20_stops(tmp_path: Path) -> None:
    require_exact(world_scenes.resumes(tmp_path, World.alone()))


def test_a_failure_is_shown_by_the_rank_that_had_it(scenes: Seen) -> None:
    (rank_0, nothing), (rank_1, shown) = scenes[2]
    assert rank_0 == launch.PEER_LOST and nothing == ""
    assert rank_1 == 1 and shown.count("Error: the disk of this host is damaged") == 1 and "on rank 1 of 2" in shown


def test_a_failure_of_the_first_in_turn_is_all_that_is_shown(tmp_path: Path) -> None:
    """The others, which wait for it, end before what they wait with is gone; that would say so in many lines."""
    (rank_0, _, shown), (rank_1, _, nothing) = outputs("world_scenes.py", 2, tmp_path, str(tmp_path), "turn")
    assert rank_0 == 1 and shown.count("Error: the disk of this host is damaged") == 1
    assert (rank_1, nothing) == (launch.PEER_LOST, "")


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")


def on_gpus(folder: Path, name: str, gpus: int, *overrides: str) -> list[str]:
    every = ("train.micro_batch=16", "train.validate_tokens=4000", *overrides)
    sets = [word for text in every for word in ("--set", text)]
    where = ["--data", str(folder / "data"), "--run", str(folder / name), "--gpus", str(gpus)]
    return ["train", str(SPEC), *where, *sets]


@pytest.mark.gpu
@two_gpus
def test_two_gpus_are_as_one(tmp_path: Path) -> None:
    """In bf16 the gradients of a micro-batch are rounded, and it has other windows: the curves agree to 2 %."""
    write_text(tmp_path / "data")
    for name, gpus in (("one", 1), ("two", 2)):
        command = [*SPECC, *on_gpus(tmp_path, name, gpus, "train.steps=10", "train.schedule={}")]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=0.02)
    start = read_start(tmp_path / "two" / "log.jsonl")
    assert (start["processes"], start["device"]) == (2, "cuda:0")


@pytest.mark.gpu
@two_gpus
@linux
def test_the_death_of_one_gpu_ends_all(tmp_path: Path) -> None:
    """The other waits in NCCL, which does not notice; the command ends it within a minute."""
    write_text(tmp_path / "data")
    with started(tmp_path, on_gpus(tmp_path, "run", 2, "train.steps=100000")) as (process, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        code, shown = ended(process, ranks)
    assert code == 4 and "error: rank 1 of 2 was ended by signal 9 (Killed)" in shown
