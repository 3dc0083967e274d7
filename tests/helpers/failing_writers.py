"""A process of test_disks.py: commands that write, on a disk that fails at the n-th call, or whose power goes.

usage: failing_writers.py WRITER FOLDER FIRST STRIDE
       failing_writers.py WRITER FOLDER losses COUNT

With failing_disk.so in LD_PRELOAD. FOLDER/old is the state before the command, and the process prints one JSON object
about what happened.
"""

import contextlib
import ctypes
import errno
import io
import json
import os
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from power_loss import Disk, read_calls

SPEC = Path(__file__).parents[2] / "specs" / "gpt_mini.yaml"
ROOM = "room"  # the folder that the command writes into
CODES = (errno.ENOSPC, errno.EIO)


@dataclass(frozen=True)
class Writer:
    """A command.

    Attributes:
        words: its words; `{room}` is the folder.
        files: the files that are the old or the new ones after an error; others are written again by the next command.
        ends: the exit codes of a failure.
        commits: whether the whole result survives a power loss after the command.
        tells: what is shown if the command succeeds without writing its file, which is not its result.
    """

    words: str
    files: tuple[str, ...] = ()
    ends: tuple[int, ...] = (3,)
    commits: bool = True
    tells: str = ""

    def run(self, room: Path) -> tuple[int, str]:
        from specc.cli.app import run

        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            code = run(self.words.replace("{room}", str(room)).split())
        return code, said.getvalue()


SMALL = " ".join(
    f"--set {text}"
    for text in (
        "targets=[cpu]",
        "model.dim=32",
        "model.context=32",
        "model.blocks.count=1",
        "train.steps=3",
        "train.micro_batch=4",
        "train.tokens_per_step=128",
        "train.schedule.warmup_steps=0",
        "train.schedule.warmdown_steps=1",
        "train.validate_tokens=200",
        "train.checkpoint_every=2",
    )
)
WRITERS = {
    "artifact": Writer("export {room}/run --format artifact --out {room}/x --force", ("x",)),
    "safetensors": Writer("export {room}/run --format safetensors --out {room}/x --force", ("x",)),
    "pack": Writer("data pack {room}/text --out {room}/packed --tokenizer bytes"),
    "quantize": Writer("quantize {room}/run --max-tokens 64", ()),
    "train": Writer(
        f"train {SPEC} --run {{room}}/new --data {{room}}/text --target cpu --resume auto {SMALL}", (), (3, 4)
    ),
    "build": Writer(f"build {SPEC} --into {{room}}/generated", commits=False),
    "submission": Writer("export {room}/run --format submission --target cpu --out {room}/submission --force"),
    "eval": Writer("eval {room}/run --data {room}/text --max-tokens 64", tells="not recorded in the run"),
    "report": Writer("report {room}/run --out {room}/x --no-samples", ("x",)),
    "tokenizer": Writer("data tokenizer {room}/text --vocab 280 --out {room}/x.json"),
}


def content(room: Path) -> dict[str, bytes]:
    """Every file, without locks, logs and records: those have times."""
    timed = ("report.json", "COMMIT", "state.json", ".lock")
    return {
        str(path.relative_to(room)): path.read_bytes()
        for path in sorted(room.rglob("*"))
        if path.is_file() and path.suffix != ".jsonl" and path.name not in timed
    }


class Room:
    """Runs the command of a writer in a folder, on the disk of failing_disk.c."""

    def __init__(self, writer: Writer, folder: Path) -> None:
        self.writer, self.folder, self.room = writer, folder, folder / ROOM
        self.disk = ctypes.CDLL(None)
        self.disk.disk_stop.restype = ctypes.c_long

    def attempt(self, nth: int, code: int = 0, persistent: bool = False, log: str = "") -> tuple[int, str, int]:
        start = (str(self.room).encode(), ctypes.c_long(nth), code, int(persistent), log.encode())
        self.disk.disk_start(*start)
        try:
            end, said = self.writer.run(self.room)
        finally:
            calls = self.disk.disk_stop()
        return end, said, calls

    def fresh(self) -> None:
        shutil.rmtree(self.room, ignore_errors=True)
        shutil.copytree(self.folder / "old", self.room)

    def first(self) -> int:
        """Runs the command without a failure, and returns the number of its calls."""
        self.fresh()
        end, said, total = self.attempt(0, log=str(self.folder / "calls"))
        assert end == 0, said
        return total


def lose(name: str, folder: Path, count: int) -> None:
    """Loses the power after random calls, and after the last. What survives is the old or the new state, and the next
    command gives the new one."""
    from specc.runtime.storage import checkpoint

    writer, rng = WRITERS[name], random.Random(f"26 {name}")
    room = Room(writer, folder)
    room.first()
    old, new = content(folder / "old"), content(room.room)
    calls = read_calls(folder / "calls")
    disk, wrong = Disk(folder / "old", room.room, folder / "calls"), list[str]()
    stops = sorted([len(calls), *(rng.randint(1, len(calls)) for _ in range(count - 1))])
    applied = 0
    for stop in stops:
        while applied < stop:
            disk.apply(applied + 1, calls[applied])
            applied += 1
        entries = rng.random() < 0.5
        where = f"after call {stop} of {len(calls)}, {'with' if entries else 'without'} entries that were not synced"
        shutil.rmtree(room.room)
        disk.survivors(room.room, entries, rng)
        state = content(room.room)
        for file in writer.files:
            if state.get(file) not in (old.get(file), new[file]) or (stop == len(calls) and state[file] != new[file]):
                wrong.append(f"{where}: {file} is neither the old nor the new one")
        lost = [file for file, data in old.items() if file.startswith("run/checkpoints") and state.get(file) != data]
        if lost:
            wrong.append(f"{where}: lost {lost}")
        for checkpoints in room.room.glob("*/checkpoints"):
            newest = checkpoint.latest(checkpoints, lambda text, where=where: wrong.append(f"{where}: {text}"))  # type: ignore[misc]
            if stop == len(calls) and newest is None:
                wrong.append(f"{where}: no checkpoint is left")
        if state == new:
            continue
        missing = [file for file in new if "generated" not in Path(file).parts and state.get(file) != new[file]]
        if stop == len(calls) and writer.commits and missing:  # generated code is built anew
            wrong.append(f"{where}: the command had ended, and {missing} are lost")
        end, said = writer.run(room.room)
        if end != 0 or content(room.room) != new:
            other = sorted(key for key in {*new, *content(room.room)} if content(room.room).get(key) != new.get(key))
            wrong.append(f"{where}: the next command: exit code {end}, other files {other[:4]}: {said[-300:]}")
    print(json.dumps({"calls": len(calls), "losses": len(stops), "wrong": wrong}))


def main(name: str, folder: Path, first: int, stride: int) -> None:
    writer = WRITERS[name]
    room = Room(writer, folder)
    total = room.first()
    old, new = content(folder / "old"), content(room.room)
    struck, wrong = 0, list[str]()
    for nth in range(first, total + 1, stride):
        for persistent in (False, True):
            code = CODES[nth % 2]
            room.fresh()
            end, said, calls = room.attempt(nth, code, persistent)
            struck += calls >= nth
            where = f"call {nth} of {total}, {errno.errorcode[code]}, {'always' if persistent else 'once'}"
            if end not in (*writer.ends, 0) or "Traceback" in said:
                wrong.append(f"{where}: exit code {end}: {said[-600:]}")
            state = content(room.room)
            for file in writer.files:
                if state.get(file) not in (old.get(file), new[file]):
                    wrong.append(f"{where}: {file} is neither the old nor the new one")
            lost = [
                file for file, data in old.items() if file.startswith("run/checkpoints") and state.get(file) != data
            ]
            if lost:
                wrong.append(f"{where}: lost {lost}")
            if end == 0 and state != new and not (writer.tells and writer.tells in said):
                wrong.append(f"{where}: exit code 0, without its result")
            if state == new:  # it needed nothing of this call, or failed after the result was in its place
                continue
            end, said = writer.run(room.room)
            if end != 0 or content(room.room) != new:
                other = sorted(
                    key for key in {*new, *content(room.room)} if content(room.room).get(key) != new.get(key)
                )
                wrong.append(f"{where}: the next command: exit code {end}, other files {other[:4]}: {said[-300:]}")
    print(json.dumps({"calls": total, "struck": struck, "wrong": wrong}))


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    writer_name, place, begin, last = sys.argv[1:]
    if begin == "losses":
        lose(writer_name, Path(place), int(last))
    else:
        main(writer_name, Path(place), int(begin), int(last))
