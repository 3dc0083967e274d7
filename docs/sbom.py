"""The software bill of materials of specc, in CycloneDX 1.5: the packages of requirements.lock."""

import hashlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^ ;\\]+)(?: ; ([^\\\n]+?))?(?: \\)?$", re.MULTILINE)


def sbom() -> str:
    """Returns the bill as JSON. It depends only on pyproject.toml and requirements.lock, which has the hashes of files.

    A package of some platforms has its marker. All direct dependencies, of extras too, are dependencies of specc.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = LOCK.read_text()
    components = [_component(*pin) for pin in PIN.findall(text)]
    references = {component["name"]: component["bom-ref"] for component in components}
    requirements = [
        *project["dependencies"],
        *(word for extra in project["optional-dependencies"].values() for word in extra),
    ]
    direct = {_normal(re.split(r"[><=!\[; ]", requirement)[0]) for requirement in requirements}
    root = f"pkg:pypi/{project['name']}@{project['version']}"
    specc = {
        "type": "application",
        "bom-ref": root,
        "name": project["name"],
        "version": project["version"],
        "purl": root,
    }
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                **specc,
                "licenses": [{"license": {"id": project["license"]}}],
                "properties": [_property(LOCK.name, f"sha256:{hashlib.sha256(text.encode()).hexdigest()}")],
            }
        },
        "components": components,
        "dependencies": [{"ref": root, "dependsOn": sorted(ref for name, ref in references.items() if name in direct)}],
    }
    return json.dumps(bill, indent=1) + "\n"


def _component(name: str, version: str, marker: str) -> dict[str, Any]:
    reference = f"pkg:pypi/{_normal(name)}@{version.replace('+', '%2B')}"
    component = {"type": "library", "bom-ref": reference, "name": _normal(name), "version": version, "purl": reference}
    return component | ({"properties": [_property("marker", marker)]} if marker else {})


def _property(name: str, value: str) -> dict[str, str]:
    return {"name": f"specc:{name}", "value": value}


def _normal(name: str) -> str:
    """Returns the name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
