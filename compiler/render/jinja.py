"""The one Jinja environment. Text reaches a template only through a typed context and these filters."""

import importlib.resources
import re
from functools import cache

import jinja2

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _py(value: object) -> str:
    """A Python literal."""
    if isinstance(value, str | int | float | bool | tuple) or value is None:
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


class _Loader(jinja2.BaseLoader):
    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, None]:
        file = importlib.resources.files("specc.templates").joinpath(template)
        if not file.is_file():
            raise jinja2.TemplateNotFound(template)
        return file.read_text(encoding="utf-8"), str(file), None


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
    """The text of `template` over a typed context, for the spec file named `source`."""
    return environment().get_template(template).render(c=context, source=source, key=key, template=template)
