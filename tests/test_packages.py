"""pyproject.toml installs exactly the packages that exist."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "cli": "cli",
    "compiler": "compiler",
    "runtime": "runtime",
    "specs": "specs",
    "templates": "templates",
    "docs/reference": "reference",
}


def test_every_package_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    results = {
        ".".join(("specc", name, *path.parent.relative_to(ROOT / folder).parts))
        for folder, name in FOLDERS.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(settings["packages"]) == results
