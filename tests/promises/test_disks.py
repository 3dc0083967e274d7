"""Disks that fail, and power that goes: a command ends with one clear line, and what was committed stays."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from failing_writers import WRITERS
from power_loss import Disk
from run_samples import HELPERS, make_run, small_spec, write_text
from tiers import Trials, rounds_left, soak, tiers

from specc.runtime.quantize.pipeline import QuantizeOptions, quantize

QUICK = ("artifact", "safetensors")  # the others take a second for each call, and run in `make soak`
COMMITS = (*QUICK, *(name for name in WRITERS if WRITERS[name].commits and name not in QUICK))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = next((name for name in ("gcc", "cc", "clang") if shutil.which(name)), None)
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and Linux")
    library = tmp_path_factory.mktemp("disk") / "failing_disk.so"
    source = str(HELPERS / "failing_disk.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), source, "-ldl"], check=True)
    return library


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state before a command: a quantized run, a text, and a file of an earlier export."""
    folder = tmp_path_factory.mktemp("old")
    write_text(folder / "text")
    run = make_run(folder / "run", small_spec("model.blocks.count=1", "quant.promote=null"), str(folder / "text"))
    quantize(run.directory, QuantizeOptions(cache=folder / "cache", max_tokens=64), lambda _: None)
    shutil.rmtree(folder / "cache")
    (folder / "x").write_bytes(b"of an earlier export")
    return folder


def attempts(disk: Path, old: Path, folder: Path, writer: str, *words: object) -> dict[str, object]:
    folder.mkdir()
    (folder / "old").symlink_to(old)
    environment = {**os.environ, "LD_PRELOAD": str(disk), "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, str(HELPERS / "failing_writers.py"), writer, str(folder), *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return seen


def fail_each_call(disk: Path, old: Path, folder: Path, writer: str, most: int) -> None:
    """Fails each call of a writer, or at most so many of them: once, and from then on; no space left, or an error of
    the device."""
    total = int(str(attempts(disk, old, folder / f"{writer}_count", writer, 10**9, 1)["calls"]))
    assert total > 3
    stride = max(1, -(-total // most))
    seen = attempts(disk, old, folder / writer, writer, 1, stride)
    assert seen["wrong"] == [] and int(str(seen["struck"])) >= 2 * (total // stride) * 0.9, (writer, seen)


@tiers("C25", writers=(2, 9), failing_calls_of_each=(12, 500))
def test_each_failing_call_is_a_clean_failure(
    trials: Trials, disk: Path, old: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    most, cache = trials["failing_calls_of_each"], pytestconfig.cache
    names = {f"{writer}, {most}": writer for writer in WRITERS if writer != "train"}
    quick = trials["writers"] == len(QUICK)
    assert cache is not None and (quick or len(names) == trials["writers"])
    for writer in QUICK if quick else (names[name] for name in rounds_left(cache, "C25", [*names])):
        fail_each_call(disk, old, tmp_path, writer, most)


@soak("C25", failing_calls_of_training=500)
def test_each_failing_call_of_training_is_a_clean_failure(
    trials: Trials, disk: Path, old: Path, tmp_path: Path
) -> None:
    fail_each_call(disk, old, tmp_path, "train", trials["failing_calls_of_training"])


def order_faults(calls: list[tuple[str, str, str]]) -> list[str]:
    """What a power loss could undo or leave half-written: data that were not synced before the rename that commits
    them, and a rename whose folder was not synced after it."""
    faults, former = [], dict[str, set[str]]()  # the names that a path had before renames
    for number, (call, source, target) in enumerate(calls):
        if call != "rename":
            continue
        names = {source} | former.get(source, set())
        former[target] = names
        parts = Path(target).parts
        if any(part.startswith(".") for part in parts) or "generated" in parts:  # not in place yet; built anew if lost
            continue
        inside = [
            i
            for i, (name, path, _) in enumerate(calls[:number])
            if name == "write" and any(is_in(path, name) for name in names)
        ]
        for path in {calls[i][1] for i in inside}:
            last = max(i for i in inside if calls[i][1] == path)
            if ("fsync", path, "") not in calls[last:number]:
                faults.append(f"{path} was not synced before its rename to {target}")
        if ("fsync", str(Path(target).parent), "") not in calls[number:]:
            faults.append(f"the folder of {target} was not synced after the rename")
        if not inside:
            faults.append(f"nothing was written to {source}")
    return faults


def is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


@tiers("C26", writers=(2, 9))
def test_data_are_synced_before_the_rename_and_the_folder_after(
    trials: Trials, disk: Path, old: Path, tmp_path: Path
) -> None:
    assert trials["writers"] in (len(QUICK), len(COMMITS))
    for writer in COMMITS[: trials["writers"]]:
        attempts(disk, old, tmp_path / writer, writer, 10**9, 1)
        lines = (tmp_path / writer / "calls").read_text().splitlines()
        calls = [(name, first, second) for name, first, second in (line.split("\t") for line in lines)]
        assert any(name == "rename" for name, _, _ in calls)
        assert order_faults(calls) == [], writer


@tiers("C26", writers_without_power=(2, 9), power_losses_of_each=(6, 50))
def test_what_survives_a_power_loss_is_the_old_or_the_new_state(
    trials: Trials, disk: Path, old: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """After any call: what was synced is left, or every entry of a folder, but no data that were not synced. After the
    last call, all of the result is left."""
    losses, cache = trials["power_losses_of_each"], pytestconfig.cache
    quick = trials["writers_without_power"] == len(QUICK)
    names = {f"{writer}, {losses}": writer for writer in COMMITS}
    assert cache is not None and (quick or len(names) == trials["writers_without_power"])
    for writer in QUICK if quick else (names[name] for name in rounds_left(cache, "C26", [*names])):
        seen = attempts(disk, old, tmp_path / writer, writer, "losses", losses)
        assert seen["wrong"] == [] and seen["losses"] == losses, (writer, seen)


def test_a_lost_disk_has_what_was_synced(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a").write_text("old")
    log, room = tmp_path / "log", tmp_path / "room"
    calls = [("open", ".t"), ("write", ".t"), ("fsync", ".t"), ("rename", ".t", "a"), ("write", "b"), ("fsync", "")]
    Path(f"{log}.3").write_text("new")
    full = [(name, str(room / path), str(room / other[0]) if other else "") for name, path, *other in calls]
    full.insert(4, ("open", str(room / "b"), ""))
    for stop, synced, written in ((2, {"a": b"old"}, {".t", "a"}), (4, {"a": b"old"}, {"a"}), (7, None, None)):
        lost = Disk(tmp_path / "old", room, log)
        for line, call in enumerate(full[:stop], 1):
            lost.apply(line, call)
        for entries in (False, True):
            lost.survivors(tmp_path / f"{stop} {entries}", entries, random.Random(0))
        left, more = (
            {path.name: path.read_bytes() for path in (tmp_path / f"{stop} {entries}").iterdir()}
            for entries in (False, True)
        )
        if synced is None:
            assert left == more and left["a"] == b"new" and left["b"] in (b"", bytes(64))
        else:
            assert left == synced and more.keys() == written
            assert more["a"] == (b"old" if stop == 2 else b"new")


def test_the_judge_of_orders_sees_each_fault() -> None:
    good = [("write", "/a/.t", ""), ("fsync", "/a/.t", ""), ("rename", "/a/.t", "/a/t"), ("fsync", "/a", "")]
    assert order_faults(good) == []
    for missing in (0, 1, 3):
        assert order_faults([call for i, call in enumerate(good) if i != missing])
    late = [good[0], good[1], ("write", "/a/.t", ""), *good[2:]]
    assert "was not synced before" in order_faults(late)[0]
