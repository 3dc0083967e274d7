"""Creates a spec as a copy of another spec."""

import importlib.resources
import re
from pathlib import Path

from specc.compiler.errors import SpeccError
from specc.compiler.generated_folder import replace_file
from specc.compiler.small import small_version
from specc.compiler.spec.check import load
from specc.compiler.spec.json_schema import schema_text

MODELINE = "$schema=schema.json"  # editors read the path of the schema from this line


def origin_of(name: str, folder: Path) -> Path:
    """Returns the path of the spec file `name`.yaml in `folder`. If this file does not exist, returns the path of the
    example with this name that is installed with specc.

    Raises SpeccError if neither file exists.
    """
    path = folder / f"{name}.yaml"
    if path.exists():
        return path
    installed = Path(str(importlib.resources.files("specc.specs")))
    if (path := installed / f"{name}.yaml").exists():
        return path
    names = sorted({path.stem for place in (folder, installed) for path in place.glob("*.yaml")})
    raise SpeccError(f"there is no spec named {name}", f"name a file, or one of {', '.join(names)}")


def copied(origin: Path, target: Path, name: str, small: bool = False) -> None:
    """Writes a copy of `origin`, with its comments, to `target` under another model name.

    The copy references schema.json, which editors read. If the folder of `target` has no schema.json, the function also
    writes this file.

    Args:
        origin: The spec to copy.
        target: The new file. Missing folders are created.
        name: The model name: 1 to 64 characters of `a-z`, `0-9` and `_`, beginning with a letter. YAML must read it as
            a string.
        small: Whether the copy has the small sizes of `small_version`.

    Raises:
        SpeccError: If `target` exists, `name` is not a valid model name, or `origin` or the result is not a valid spec.
            Also if `origin` has no line `name: ...` at the left margin, or if `small` is True but no small sizes are
            valid. In all these cases, nothing is written.
    """
    if not re.fullmatch(r"(?!(null|true|false)$)[a-z][a-z0-9_]{0,63}", name):
        hint = "use 1 to 64 lower-case letters, digits and _, starting with a letter, but not null, true or false"
        raise SpeccError(f"{name!r} is not a model name", hint)
    if target.exists():
        raise SpeccError(f"{target} exists already", "choose another name, or remove it first")
    load(origin)
    text = origin.read_text(encoding="utf-8")
    renamed, count = re.subn(r"(?m)^name:[ \t]*[a-z][a-z0-9_]*", f"name: {name}", text, count=1)
    if not count:
        message = f"{origin} has no line `name: ...` at the left margin"
        raise SpeccError(message, "write `name: ...` on a separate line, without indentation")
    load(renamed)
    renamed = small_version(renamed, origin.stem) if small else renamed
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, renamed)
    schema = target.with_name("schema.json")
    if MODELINE in renamed and not schema.exists():
        replace_file(schema, schema_text())
