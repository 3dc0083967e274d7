"""The files of a disk after a power loss, by the log of calls of failing_disk.c.

Data of a file survive from its last sync. Entries of a folder survive from its last sync, or all of them do, as a file
system may also write them earlier; data never do. Files that were never synced are empty, or have zeros.
"""

import os
import random
from collections.abc import Sequence
from pathlib import Path

Call = tuple[str, str, str]  # a name, and one or two paths
ROOT = 0


def read_calls(log: Path) -> list[Call]:
    lines = (line.split("\t") for line in log.read_text().splitlines())
    return [(name, first, second) for name, first, second in lines]


class Disk:
    """A folder whose calls are applied one after the other.

    Args:
        old: the content of the folder before the first call, all of it synced.
        room: the folder, as the paths of calls name it.
        log: the log; the data of each sync are in files beside it, by the number of the line.
    """

    def __init__(self, old: Path, room: Path, log: Path) -> None:
        self._room, self._log = room, log
        self._count = ROOT
        self._entries: dict[int, dict[str, int]] = {}  # of each folder
        self._synced_entries: dict[int, dict[str, int]] = {}
        self._synced_data: dict[int, bytes] = {}
        self._fill(ROOT, old)

    def _fill(self, folder: int, path: Path) -> None:
        self._entries[folder] = {}
        for entry in sorted(path.iterdir()):
            self._entries[folder][entry.name] = number = self._new()
            if entry.is_dir():
                self._fill(number, entry)
            else:
                self._synced_data[number] = entry.read_bytes()
        self._synced_entries[folder] = {**self._entries[folder]}

    def _new(self) -> int:
        self._count += 1
        return self._count

    def _at(self, parts: Sequence[str]) -> int | None:
        number: int | None = ROOT
        for part in parts:
            number = self._entries.get(-1 if number is None else number, {}).get(part)
        return number

    def apply(self, line: int, call: Call) -> None:
        """Applies a call; `line` counts from 1."""
        name, path, other = call
        parts = Path(path).relative_to(self._room).parts
        number, folder = self._at(parts), self._at(parts[:-1])
        if name in ("open", "mkdir") and number is None and folder is not None:
            self._entries[folder][parts[-1]] = number = self._new()
            if name == "mkdir":
                self._entries[number], self._synced_entries[number] = {}, {}
        elif name == "unlink" and folder is not None:
            self._entries[folder].pop(parts[-1], None)
        elif name == "rename":
            target = Path(other).relative_to(self._room).parts
            goal = self._at(target[:-1])
            assert number is not None and folder is not None and goal is not None, call
            self._entries[goal][target[-1]] = self._entries[folder].pop(parts[-1])
        elif name == "fsync" and number in self._entries:
            self._synced_entries[number] = {**self._entries[number]}
        elif name == "fsync" and number is not None:
            self._synced_data[number] = Path(f"{self._log}.{line}").read_bytes()

    def survivors(self, folder: Path, entries: bool, rng: random.Random) -> None:
        """Writes what is left into a new folder; with `entries`, those that were not synced too."""
        self._write(ROOT, folder, self._entries if entries else self._synced_entries, rng)

    def _write(self, number: int, path: Path, tables: dict[int, dict[str, int]], rng: random.Random) -> None:
        path.mkdir()
        for name, entry in tables[number].items():
            if entry in tables:
                self._write(entry, path / name, tables, rng)
            else:
                lost = rng.choice((b"", bytes(64)))
                (path / name).write_bytes(self._synced_data.get(entry, lost))
        os.utime(path)
