"""The one Jinja environment. Text reaches a template only through a typed context and these filters."""

import ast
import importlib.resources
import json
import re
import traceback
from functools import cache
from pathlib import Path

import jinja2

from specc.compiler.errors import SpeccError

MEND = "mend the template; `git diff templates` shows what changed in it"

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _py(value: object) -> str:
    """A Python literal, its strings in double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int | float | bool) or value is None:
        return repr(value)
    raise TypeError(f"no Python literal for {type(value).__name__}")


def _cpp(value: object) -> str:
    """A C++ literal of a number or a flag."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value!r}f"
    raise TypeError(f"no C++ literal for {type(value).__name__}")


def _ident(value: object) -> str:
    """A name, refused if it is none."""
    if isinstance(value, str) and _IDENTIFIER.fullmatch(value):
        return value
    raise TypeError(f"not an identifier: {value!r}")


class TemplateFault(SpeccError):
    """A template that renders no code: `message` names its file and line."""


class _Loader(jinja2.BaseLoader):
    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, None]:
        file = importlib.resources.files("specc.templates").joinpath(template)
        if not file.is_file():
            raise jinja2.TemplateNotFound(template)
        return file.read_text(encoding="utf-8"), str(file), None


def exists(template: str) -> bool:
    """Whether there is such a template."""
    return importlib.resources.files("specc.templates").joinpath(template).is_file()


@cache
def environment() -> jinja2.Environment:
    """Strict: an undefined name raises. Blocks leave no blank lines behind."""
    env = jinja2.Environment(
        loader=_Loader(),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        auto_reload=False,
    )
    env.filters = {"py": _py, "cpp": _cpp, "ident": _ident, "join": env.filters["join"]}
    return env


def render(template: str, context: object, source: str, key: str) -> str:
    """The text of `template` over a typed context, for the spec file named `source`.

    Raises TemplateFault where it asks for what there is not, or renders Python that does not parse.
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
    """The template and line that an error of rendering comes from: the innermost of Jinja's frames."""
    root, place = str(importlib.resources.files("specc.templates")), (template, 1)
    for frame, line in traceback.walk_tb(error.__traceback__):
        if (file := frame.f_code.co_filename).endswith(".jinja"):
            place = (Path(file).relative_to(root).as_posix(), line)
    return place


def _require_python(text: str, template: str) -> None:
    """Raises TemplateFault, with the line of the template where it stands there as rendered, unless `text` parses."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        lines = text.splitlines()
        wrong = lines[min(error.lineno or 1, len(lines)) - 1] if lines else ""
        written = importlib.resources.files("specc.templates").joinpath(template).read_text(encoding="utf-8")
        at = next((f":{i}" for i, line in enumerate(written.splitlines(), 1) if line == wrong), "")
        message = f"templates/{template}{at}: what it renders is no Python: line {error.lineno}, {error.msg}: {wrong}"
        raise TemplateFault(message, MEND) from None
