"""Finds the features of specc: every module-level value or class of a kind inside one package."""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Protocol, TypeVar

from specc.compiler.strict import StrictModel, tag_of


class Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)
M = TypeVar("M", bound=StrictModel)
T = TypeVar("T")


def _modules(package: ModuleType) -> list[ModuleType]:
    """Every module of a package and of the packages in it, in order of name."""
    names = sorted(info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))
    return [importlib.import_module(name) for name in names]


@cache
def catalog(package: ModuleType, kind: type[N]) -> Mapping[str, N]:
    """All module-level instances of `kind` in the modules of `package`, by their `name`, in sorted file order.

    Raises ValueError when two of them carry one name.
    """
    entries: dict[str, N] = {}
    for module in _modules(package):
        for value in vars(module).values():
            if isinstance(value, kind) and entries.setdefault(value.name, value) is not value:
                raise ValueError(f"{package.__name__}: two entries are named {value.name!r}")
    return MappingProxyType(entries)


@cache
def models(package: ModuleType, base: type[M], field: str) -> tuple[type[M], ...]:
    """All subclasses of `base` defined in `package` whose `field` is a one-word Literal, in sorted file order.

    Raises ValueError when two of them state the same word.
    """
    by_tag: dict[str, type[M]] = {}
    for module in _modules(package):
        for value in vars(module).values():
            if not (isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__):
                continue
            tag = tag_of(value, field)
            if tag is not None and by_tag.setdefault(tag, value) is not value:
                raise ValueError(f"{package.__name__}: two models are of {field} {tag!r}")
    return tuple(by_tag.values())


@cache
def classes(package: ModuleType, base: type[T]) -> Mapping[str, type[T]]:
    """All subclasses of `base` defined in `package` that state a `name`, by it, in sorted file order.

    Raises ValueError when two of them state the same name.
    """
    by_name: dict[str, type[T]] = {}
    for module in _modules(package):
        for value in vars(module).values():
            if not (isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__):
                continue
            name = vars(value).get("name")
            if isinstance(name, str) and by_name.setdefault(name, value) is not value:
                raise ValueError(f"{package.__name__}: two classes are named {name!r}")
    return MappingProxyType(by_name)
