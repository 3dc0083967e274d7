"""The package is reproducible, and can be installed from pinned hashes only."""

import hashlib
import importlib.resources
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from tiers import Trials, tiers

ROOT = Path(__file__).parents[2]
PARTS = ("cli", "compiler", "runtime", "templates", "specs", "docs/reference", "build_backend")
FILES = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
BUILD = """
import os, sys, time
sys.path.insert(0, "build_backend")
import reproducible as backend
os.makedirs("dist")
print(backend.build_wheel("dist"))
print(backend.build_sdist("dist"))
"""


def built(folder: Path, mtime: int, umask: int, zone: str) -> dict[str, str]:
    """The digests of a wheel and a source archive, built from a copy of the sources."""
    folder.mkdir(parents=True)
    for part in PARTS:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy(ROOT / file, folder)
    for path in sorted(folder.rglob("*"), reverse=mtime % 2 == 0):
        os.utime(path, (mtime, mtime))
        path.chmod(path.stat().st_mode & ~umask)
    environment = {**os.environ, "TZ": zone, "PYTHONHASHSEED": str(mtime % 1000), "LC_ALL": "C"}
    subprocess.run(
        [sys.executable, "-c", f"import os; os.umask({umask}); exec({BUILD!r})"],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
    )
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (folder / "dist").iterdir()}


@tiers("C9", builds=(2, 8))
def test_builds_are_equal(trials: Trials, tmp_path: Path) -> None:
    """From other paths, with other times of files, time zones, modes and seeds of hashes."""
    pytest.importorskip("setuptools", "77")
    results = [
        built(
            tmp_path / f"{'x' * (i + 1)}" / f"copy {i}",
            10**9 + 86_401 * i,
            (0o022, 0o077)[i % 2],
            ("UTC", "Asia/Tokyo")[i % 2],
        )
        for i in range(trials["builds"])
    ]
    assert len(results[0]) == 2 and all(result == results[0] for result in results)
    (archive,) = (tmp_path / "x" / "copy 0" / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:  # which is what is published
        opened.extractall(tmp_path / "from", filter="data")
    (sources,) = (tmp_path / "from").iterdir()
    environment = {**os.environ, "PYTHONPATH": ""}
    subprocess.run([sys.executable, "-c", BUILD], cwd=sources, env=environment, check=True, capture_output=True)
    (wheel,) = (sources / "dist").glob("*.whl")
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == results[0][wheel.name]


def normal(name: str) -> str:
    """The name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned() -> dict[str, str]:
    """The versions of constraints.txt, by name."""
    lines = (line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    return {normal(name): version for name, version in lines}


def locked() -> dict[str, str]:
    """The versions of requirements.lock, by name. Asserts that every requirement has at least one SHA-256."""
    hashed: dict[str, str] = {}
    for block in (ROOT / "requirements.lock").read_text().replace("\\\n", " ").splitlines():
        if block and not block.lstrip().startswith("#"):
            requirement, *hashes = block.split("--hash=sha256:")
            name, version = requirement.split(";")[0].strip().split("==")
            assert hashes and all(len(word.strip()) == 64 for word in hashes), block
            hashed[normal(name.split("[")[0])] = version
    return hashed


def test_the_lock_has_hashes_of_the_pinned_versions() -> None:
    """Every requirement has at least one SHA-256, and the version of constraints.txt, where that has one."""
    hashed = locked()
    assert len(hashed) > 90
    outside = {"nvidia-cutlass"}  # installed without its dependencies
    assert {name: hashed.get(name) for name in pinned() if name not in outside} == {
        name: version for name, version in pinned().items() if name not in outside
    }


def test_the_dependencies_of_the_project_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for requirement in (*project["dependencies"], *extras["train"], *extras["dev"], *extras["onnx"]):
        assert normal(re.split(r"[><=!\[; ]", requirement)[0]) in pinned(), requirement


def test_the_bill_of_materials_lists_the_packages_of_the_lock() -> None:
    """The bill is installed with specc. It names the lock by its digest, and the direct dependencies of specc."""
    text = importlib.resources.files("specc.reference").joinpath("sbom.cdx.json").read_text(encoding="utf-8")
    bill = json.loads(text)
    root, parts = bill["metadata"]["component"], bill["components"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    assert (root["name"], root["version"]) == (project["name"], project["version"])
    assert {part["name"]: part["version"] for part in parts} == locked() and len(parts) == len(locked())
    assert all(part["purl"] == part["bom-ref"] == f"pkg:pypi/{part['name']}@{part['version']}" for part in parts)
    digest = hashlib.sha256((ROOT / "requirements.lock").read_bytes()).hexdigest()
    assert root["properties"] == [{"name": "specc:requirements.lock", "value": f"sha256:{digest}"}]
    (direct,) = bill["dependencies"]
    names = {re.split(r"[><=!\[; ]", requirement)[0] for requirement in project["dependencies"]}
    wanted = {f"pkg:pypi/{name}@{locked()[name]}" for name in map(normal, names)}
    assert wanted <= set(direct["dependsOn"]) <= {part["bom-ref"] for part in parts}


def test_actions_are_pinned_by_commit() -> None:
    used = re.findall(r"uses: (\S+)", (ROOT / "docs/github/specc.yml").read_text())
    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used)
