"""Finds all module-level instances of a class, or all subclasses of a class, in the modules of a package."""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property
from itertools import chain
from types import MappingProxyType, ModuleType
from typing import Annotated, Any, Generic, Protocol, TypeVar, Union

from pydantic import Field, TypeAdapter, ValidationError, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from specc.compiler.strict import StrictModel, as_tuples, tag_of


class Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)
M = TypeVar("M", bound=StrictModel)
T = TypeVar("T")
V = TypeVar("V")


@cache
def _names(package: ModuleType) -> tuple[str, ...]:
    return tuple(sorted(info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")))


def _unique(package: ModuleType, entries: Iterable[tuple[str, V]], what: str) -> Mapping[str, V]:
    by_name: dict[str, V] = {}
    for name, value in entries:
        if by_name.setdefault(name, value) is not value:
            raise ValueError(f"{package.__name__} has a duplicate: two {what} {name!r}")
    return MappingProxyType(by_name)


def _subclasses(modules: Iterable[str], base: type[T]) -> Iterator[type[T]]:
    for name in modules:
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, type) and issubclass(value, base) and value.__module__ == name:
                yield value


@cache
def catalog(package: ModuleType, kind: type[N]) -> Mapping[str, N]:
    """Returns all module-level instances of `kind` in the modules of `package`. The keys are the attribute `name` of
    each instance. The order is the order of the modules.

    Raises ValueError if two instances have the same name.
    """
    values = (value for name in _names(package) for value in vars(importlib.import_module(name)).values())
    entries = ((value.name, value) for value in values if isinstance(value, kind))
    return _unique(package, entries, "entries are named")


@cache
def models(package: ModuleType, base: type[M], field: str) -> tuple[type[M], ...]:
    """Returns the subclasses of `base` in `package` whose field named `field` has a Literal type with one value. The
    order is the order of the modules.

    Raises ValueError if two classes have the same literal.
    """
    tagged = ((tag, model) for model in _subclasses(_names(package), base) if (tag := tag_of(model, field)) is not None)
    return tuple(_unique(package, tagged, f"models are of {field}").values())


@cache
def classes(package: ModuleType, base: type[T]) -> Mapping[str, type[T]]:
    """Returns the subclasses of `base` in `package` that set the attribute `name` in their class body, by this name.
    The order is the order of the modules.

    Raises ValueError if two classes have the same name.
    """
    named = ((vars(value).get("name"), value) for value in _subclasses(_names(package), base))
    return _unique(package, ((name, value) for name, value in named if isinstance(name, str)), "classes are named")


class Kinds(Generic[M]):
    """The type of a field whose value is one of several Pydantic models. A tag such as `kind` distinguishes the models.

    A model is imported only when data contain the tag of the model. Pydantic then builds the schema of this model. All
    models are imported only to report invalid data and to write the JSON Schema.

    Args:
        package: the package that defines the models.
        roles: models, or base classes that stand for all models of the package that subclass them.
        tag: the field that holds the tag.
        form: a function that is applied to each model of the package. The results are the models of the field.
    """

    def __init__(
        self, package: ModuleType, *roles: type[M], tag: str = "kind", form: Callable[[type[M]], type[M]] | None = None
    ) -> None:
        self.package, self.roles, self.tag, self.form = package, roles, tag, form or (lambda model: model)
        self._known: dict[str, type[M] | None] = {}

    def __or__(self, other: Any) -> Any:
        return Union[self, other]  # noqa: UP007

    @cached_property
    def models(self) -> tuple[type[M], ...]:
        listed = ((role,) if tag_of(role, self.tag) else models(self.package, role, self.tag) for role in self.roles)
        return tuple(map(self.form, chain(*listed)))

    def model(self, tag: str) -> type[M] | None:
        """Returns the model with this tag, or None if no model has this tag.

        The search begins with the module named `tag`, and continues with the modules that are already imported, then
        with all modules.
        """
        if tag not in self._known:
            self._known[tag] = next(self._models_of(tag), None)
        return self._known[tag]

    def _models_of(self, tag: str) -> Iterator[type[M]]:
        names = _names(self.package)
        likely = [f"{self.package.__name__}.{tag}"], [name for name in names if name in sys.modules], names
        for modules in likely:
            for role in self.roles:
                defined = _subclasses([name for name in modules if name in names], role)
                yield from (self.form(model) for model in (role, *defined) if tag_of(model, self.tag) == tag)

    @cached_property
    def _union(self) -> TypeAdapter[M]:
        union: Any = Union[self.models]  # noqa: UP007  (a tuple of classes, not two)
        return TypeAdapter(Annotated[union, Field(discriminator=self.tag)])

    def _validated(self, value: Any, info: ValidationInfo) -> M:
        if info.mode == "json":
            value = as_tuples(value)
        tag = value.get(self.tag) if isinstance(value, dict) else getattr(value, self.tag, None)
        model = self.model(tag) if isinstance(tag, str) else None
        if model is not None:
            with suppress(ValidationError):
                return model.model_validate(value)
        return self._union.validate_python(value)  # raises an error that names the tag and all models

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self._validated)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> Any:
        return handler(self._union.core_schema)
