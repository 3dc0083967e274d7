"""The build backend: setuptools, with archives that depend on the contents of the sources only.

Times, users, file modes and the order of folders differ between checkouts. They are replaced by fixed values. The time
is that of `SOURCE_DATE_EPOCH`, or the first one that a zip file can hold.
"""

import gzip
import io
import os
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]
FIRST = 315532800  # 1980-01-01, the first time of zip files
FILE, FOLDER = 0o100644, 0o040755


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    rewrite_zip(Path(wheel_directory, name))
    return name


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    name: str = build_meta.build_sdist(sdist_directory, config_settings)
    rewrite_tar(Path(sdist_directory, name))
    return name


def epoch() -> int:
    return max(int(os.environ.get("SOURCE_DATE_EPOCH", FIRST)), FIRST)


def rewrite_zip(path: Path) -> None:
    """Writes a wheel anew: members sorted by name, RECORD last, with fixed times and modes."""
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist() if not name.endswith("/")}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for name in sorted(members, key=lambda name: (name.endswith("RECORD"), name)):
            info = zipfile.ZipInfo(name, time.gmtime(epoch())[:6])
            info.external_attr, info.compress_type, info.create_system = FILE << 16, zipfile.ZIP_DEFLATED, 3
            new.writestr(info, members[name])
    path.write_bytes(buffer.getvalue())


def rewrite_tar(path: Path) -> None:
    """Writes a source archive anew: members sorted by name, of no user, with fixed times and modes."""
    buffer = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            info = tarfile.TarInfo(member.name)
            info.type, info.size, info.mtime = member.type, member.size, epoch()
            info.mode = FOLDER & 0o777 if member.isdir() else FILE & 0o777
            new.addfile(info, old.extractfile(member) if member.isfile() else None)
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=epoch()) as packed:
        packed.write(buffer.getvalue())
