"""The Jinja environment. Templates receive text only through a typed context and the filters of this module."""

import ast
import importlib.resources
import json
import re
import traceback
from functools import cache
from pathlib import Path

import jinja2

from specc.compiler.errors import SpeccError

TEMPLATES = Path(str(importlib.resources.files("specc.templates")))
MEND = "mend the template; `git diff templates` shows what changed in it"

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
    """Returns the identifier itself. Raises TypeError if the value is not an identifier."""
    if isinstance(value, str) and _IDENTIFIER.fullmatch(value):
        return value
    raise TypeError(f"not an identifier: {value!r}")


class TemplateFault(SpeccError):
    """An error in a template. `message` states its file and line."""

    code = "G003"


def exists(template: str) -> bool:
    """Returns whether the template exists."""
    return (TEMPLATES / template).is_file()


@cache
def environment() -> jinja2.Environment:
    """Returns the Jinja environment.

    Undefined names raise an error. Lines with only a block tag leave no blank line.
    """
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        auto_reload=False,
        optimized=False,  # templates contain no constants to fold
    )
    env.filters = {"py": _py, "cpp": _cpp, "ident": _ident, "join": env.filters["join"]}
    return env


def render(template: str, context: object, source: str, key: str) -> str:
    """Returns the text of `template`.

    Args:
        template: the path of the template in `specc.templates`.
        context: the typed context, `c` in the template.
        source: the path of the spec file, for headers.
        key: the plan key, for headers.

    Raises:
        TemplateFault: if the template is invalid, reads an undefined name, or renders Python that does not parse.
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
        _require_python(text, template)
    return text


def _place_in_template(error: Exception, template: str) -> tuple[str, int]:
    """Returns the template and line of a rendering error, from the innermost frame of Jinja."""
    place = template, 1
    for frame, line in traceback.walk_tb(error.__traceback__):
        if (file := frame.f_code.co_filename).endswith(".jinja"):
            place = Path(file).relative_to(TEMPLATES).as_posix(), line
    return place


def _require_python(text: str, template: str) -> None:
    """Raises TemplateFault if `text` is not valid Python.

    The error states the line of the template, if the invalid line appears unchanged in the template.
    """
    try:
        ast.parse(text)
    except SyntaxError as error:
        lines = text.splitlines()
        wrong = lines[min(error.lineno or 1, len(lines)) - 1] if lines else ""
        written = (TEMPLATES / template).read_text(encoding="utf-8")
        at = next((f":{i}" for i, line in enumerate(written.splitlines(), 1) if line == wrong), "")
        message = f"templates/{template}{at}: the result is not Python: line {error.lineno}, {error.msg}: {wrong}"
        raise TemplateFault(message, MEND) from None
