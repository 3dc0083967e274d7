"""Registries of features: all module-level instances, or all classes, of a kind in one package."""

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
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
V = TypeVar("V")


def _modules(package: ModuleType) -> list[ModuleType]:
    """Imports every module of a package and its subpackages. Returns them sorted by name."""
    names = sorted(info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))
    return [importlib.import_module(name) for name in names]


def _unique(package: ModuleType, entries: Iterable[tuple[str, V]], what: str) -> Mapping[str, V]:
    """Returns the entries by name. Raises ValueError if two different entries have the same name."""
    by_name: dict[str, V] = {}
    for name, value in entries:
        if by_name.setdefault(name, value) is not value:
            raise ValueError(f"{package.__name__} has a duplicate: two {what} {name!r}")
    return MappingProxyType(by_name)


def _subclasses(package: ModuleType, base: type[T]) -> Iterator[type[T]]:
    for module in _modules(package):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__:
                yield value


@cache
def catalog(package: ModuleType, kind: type[N]) -> Mapping[str, N]:
    """Returns all module-level instances of `kind` in `package`, by `name`, in module order. Raises ValueError if two
    instances have the same name."""
    values = (value for module in _modules(package) for value in vars(module).values())
    entries = ((value.name, value) for value in values if isinstance(value, kind))
    return _unique(package, entries, "entries are named")


@cache
def models(package: ModuleType, base: type[M], field: str) -> tuple[type[M], ...]:
    """Returns all subclasses of `base` in `package` whose `field` is a Literal with one value, in module order. Raises
    ValueError if two classes have the same value."""
    tagged = ((tag, model) for model in _subclasses(package, base) if (tag := tag_of(model, field)) is not None)
    return tuple(_unique(package, tagged, f"models are of {field}").values())


@cache
def classes(package: ModuleType, base: type[T]) -> Mapping[str, type[T]]:
    """Returns all subclasses of `base` in `package` whose body sets `name`. The result is by name, in module order.
    Raises ValueError if two classes have the same name."""
    named = ((vars(value).get("name"), value) for value in _subclasses(package, base))
    return _unique(package, ((name, value) for name, value in named if isinstance(name, str)), "classes are named")
