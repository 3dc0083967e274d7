"""A process of test_disks.py: commands that write, on a disk that fails at the n-th call.

usage: failing_writers.py WRITER FOLDER FIRST STRIDE, with failing_disk.so in LD_PRELOAD. FOLDER/old is the state before
the command, and the process prints one JSON object about what happened.
"""

import contextlib
import ctypes
import errno
import io
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

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
    """

    words: str
    files: tuple[str, ...] = ()
    ends: tuple[int, ...] = (3,)

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
    "build": Writer(f"build {SPEC} --into {{room}}/generated"),
    "submission": Writer("export {room}/run --format submission --target cpu --out {room}/submission --force"),
    "eval": Writer("eval {room}/run --data {room}/text --max-tokens 64"),
    "report": Writer("report {room}/run --out {room}/x --no-samples", ("x",)),
    "tokenizer": Writer("data tokenizer {room}/text --vocab 280 --out {room}/x.json"),
}


def content(room: Path) -> dict[str, bytes]:
    """Every file, without locks, logs and records: those have times."""
    timed = ("report.json", "COMMIT", "state.json")
    return {
        str(path.relative_to(room)): path.read_bytes()
        for path in sorted(room.rglob("*"))
        if path.is_file() and path.suffix not in (".lock", ".jsonl") and path.name not in timed
    }


def main(name: str, folder: Path, first: int, stride: int) -> None:
    writer, room = WRITERS[name], folder / ROOM
    disk = ctypes.CDLL(None)
    disk.disk_stop.restype = ctypes.c_long

    def attempt(nth: int, code: int = 0, persistent: bool = False, log: str = "") -> tuple[int, str, int]:
        disk.disk_start(str(room).encode(), ctypes.c_long(nth), code, int(persistent), log.encode())
        try:
            end, said = writer.run(room)
        finally:
            calls = disk.disk_stop()
        return end, said, calls

    def fresh() -> None:
        shutil.rmtree(room, ignore_errors=True)
        shutil.copytree(folder / "old", room)

    fresh()
    end, said, total = attempt(0, log=str(folder / "calls"))
    assert end == 0, said
    old, new = content(folder / "old"), content(room)
    struck, wrong = 0, list[str]()
    for nth in range(first, total + 1, stride):
        for persistent in (False, True):
            code = CODES[nth % 2]
            fresh()
            end, said, calls = attempt(nth, code, persistent)
            struck += calls >= nth
            where = f"call {nth} of {total}, {errno.errorcode[code]}, {'always' if persistent else 'once'}"
            if end not in (*writer.ends, 0) or "Traceback" in said:
                wrong.append(f"{where}: exit code {end}: {said[-600:]}")
            state = content(room)
            for file in writer.files:
                if state.get(file) not in (old.get(file), new[file]):
                    wrong.append(f"{where}: {file} is neither the old nor the new one")
            lost = [
                file for file, data in old.items() if file.startswith("run/checkpoints") and state.get(file) != data
            ]
            if lost:
                wrong.append(f"{where}: lost {lost}")
            if end == 0 and state != new:
                wrong.append(f"{where}: exit code 0, without its result")
            if state == new:  # it needed nothing of this call, or failed after the result was in its place
                continue
            end, said = writer.run(room)
            if end != 0 or content(room) != new:
                other = sorted(key for key in {*new, *content(room)} if content(room).get(key) != new.get(key))
                wrong.append(f"{where}: the next command: exit code {end}, other files {other[:4]}: {said[-300:]}")
    print(json.dumps({"calls": total, "struck": struck, "wrong": wrong}))


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
