"""pyproject.toml installs exactly the packages that exist."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("cli", "compiler", "runtime", "templates")


def test_every_package_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    results = {
        "specc." + ".".join(path.parent.relative_to(ROOT).parts)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(settings["packages"]) == results
