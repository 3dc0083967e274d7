"""Registries of features: all module-level instances or classes of a kind inside one package."""

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
    """Imports every module of a package and its subpackages and returns them sorted by name."""
    names = sorted(info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))
    return [importlib.import_module(name) for name in names]


@cache
def catalog(package: ModuleType, kind: type[N]) -> Mapping[str, N]:
    """Returns all module-level instances of `kind` in the modules of `package`, by `name`, in module order.

    Raises ValueError if two instances have the same name.
    """
    entries: dict[str, N] = {}
    for module in _modules(package):
        for value in vars(module).values():
            if isinstance(value, kind) and entries.setdefault(value.name, value) is not value:
                raise ValueError(f"{package.__name__}: two entries are named {value.name!r}")
    return MappingProxyType(entries)


@cache
def models(package: ModuleType, base: type[M], field: str) -> tuple[type[M], ...]:
    """Returns all subclasses of `base` defined in `package` whose `field` is a single-valued Literal, in module order.

    Raises ValueError if two classes have the same literal.
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
    """Returns all subclasses of `base` defined in `package` that set a `name` in their body, by name, in module order.

    Raises ValueError if two classes have the same name.
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
