"""The Jinja environment. Templates receive text only through a typed context and the filters of this module."""

import builtins
import importlib.resources
import json
import re
import symtable
import traceback
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import jinja2

from specc.compiler.errors import SpeccError

TEMPLATES = Path(str(importlib.resources.files("specc.templates")))
MEND = "correct the template; `git diff templates` shows its changes"

_BUILTINS = frozenset({*dir(builtins), "__file__", "__name__"})
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _py(value: object) -> str:
    """Returns a Python literal, with strings in double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int | float | bool) or value is None:
        return repr(value)
    raise TypeError(f"no Python literal for {type(value).__name__}")


def _cpp(value: object) -> str:
    """Returns a C++ literal of a number or a flag."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value!r}f"
    raise TypeError(f"no C++ literal for {type(value).__name__}")


def _ident(value: object) -> str:
    if isinstance(value, str) and _IDENTIFIER.fullmatch(value):
        return value
    raise TypeError(f"not an identifier: {value!r}")


class TemplateFault(SpeccError):
    """Raised for an error in a template. `message` states the file and the line of the template."""

    code = "G003"


def exists(template: str) -> bool:
    return (TEMPLATES / template).is_file()


@cache
def environment() -> jinja2.Environment:
    """Returns the Jinja environment.

    Undefined names raise an error. A template line with only a block tag renders no blank line.
    """
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        auto_reload=False,
        optimized=False,  # templates contain no constant expressions to fold
    )
    env.filters = {"py": _py, "cpp": _cpp, "ident": _ident, "join": env.filters["join"]}
    return env


def render(template: str, context: object, source: str, key: str, known: Collection[str] = ()) -> str:
    """Returns the text of `template`.

    Args:
        template: the path of the template in `specc.templates`.
        context: the typed context, which the template reads as `c`.
        source: the path of the spec file, for headers.
        key: the plan key, for headers.
        known: the names that the text may read without a definition. The surrounding module defines these names.

    Raises:
        TemplateFault: if the template or the rendered Python is invalid or reads an undefined name.
    """
    try:
        loaded = environment().get_template(template)
        text = loaded.render(c=context, source=source, key=key, template=template)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateFault(f"templates/{error.name or template}:{error.lineno}: {error.message}", MEND) from error
    except (jinja2.TemplateError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        name, line = _place_in_template(error, template)
        raise TemplateFault(f"templates/{name}:{line}: {error}", MEND) from error
    if template.endswith(".py.jinja"):
        _require_python(text, template, known)
    return text


def _place_in_template(error: Exception, template: str) -> tuple[str, int]:
    place = template, 1
    for frame, line in traceback.walk_tb(error.__traceback__):
        if (file := frame.f_code.co_filename).endswith(".jinja"):
            place = Path(file).relative_to(TEMPLATES).as_posix(), line
    return place


def _require_python(text: str, template: str, known: Collection[str]) -> None:
    try:
        names = [*_undefined(symtable.symtable(text, template, "exec"))]
    except SyntaxError as error:
        raise _fault(text, template, error.lineno or 1, f"the result is not Python: {error.msg}") from None
    for name in (name for name in names if name not in known):
        line = next(i for i, line in enumerate(text.splitlines(), 1) if re.search(rf"\b{name}\b", line))
        raise _fault(text, template, line, f"the result reads {name}, which nothing defines")


def _undefined(module: symtable.SymbolTable) -> Iterator[str]:
    defined = {s.get_name() for s in module.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    defined |= _BUILTINS
    tables = [module]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            outer = table is module or symbol.is_global()
            if symbol.is_referenced() and outer and symbol.get_name() not in defined:
                yield symbol.get_name()


def _renders(written: str, line: str) -> bool:
    literals = re.split(r"\{\{.*?\}\}", written)
    return any(map(str.strip, literals)) and re.fullmatch(".*".join(map(re.escape, literals)), line) is not None


def _fault(text: str, template: str, line: int, what: str) -> TemplateFault:
    lines = text.splitlines()
    wrong = lines[min(line, len(lines)) - 1] if lines else ""
    loader = environment().loader
    assert loader is not None
    written = loader.get_source(environment(), template)[0].splitlines()
    at = next((f":{i}" for i, other in enumerate(written, 1) if _renders(other, wrong)), "")
    return TemplateFault(f"templates/{template}{at}: {what}: line {line}, {wrong.strip()}", MEND)
