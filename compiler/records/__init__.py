"""Frozen dataclasses that take little time to define."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass. Subclasses with fields must be records too.

    The decorator `dataclass(frozen=True)` compiles six methods of each class. Here, `__init__` is compiled when the
    first instance is created, and all other methods are closures. Methods that the class defines are not replaced.
    """
    dataclass(init=False, repr=False, eq=False)(cls)
    members = fields(cls)  # type: ignore[arg-type]
    assert all(member.init and member.hash is None for member in members), f"{cls.__name__}: such fields need dataclass"
    compared = [member.name for member in members if member.compare]
    values: Callable[[Any], object] = attrgetter(*compared) if compared else type

    def __init__(self: T, *args: Any, **kwargs: Any) -> None:
        cls.__init__ = _init(cls, members)  # type: ignore[method-assign]
        cls.__init__(self, *args, **kwargs)

    def __repr__(self: T) -> str:
        shown = (f"{member.name}={getattr(self, member.name)!r}" for member in members if member.repr)
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def __eq__(self: T, other: object) -> bool:
        if other is self:
            return True
        return values(self) == values(other) if type(other) is type(self) else NotImplemented

    def __hash__(self: T) -> int:
        return hash(values(self))

    def __setattr__(self: T, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self: T, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    for method in (__init__, __repr__, __eq__, __hash__, __setattr__, __delattr__):
        if vars(cls).get(method.__name__) is None:  # None is the `__hash__` of a class that defines only `__eq__`
            setattr(cls, method.__name__, method)
    return cls


def _init(cls: type, members: Sequence[Field[Any]]) -> Callable[..., None]:
    """Compiles the method `__init__` of a record."""
    known: dict[str, Any] = {"_set": object.__setattr__, "_missing": MISSING}
    parameters, values = ["self"], []
    for member in sorted(members, key=attrgetter("kw_only")):
        name, default, value = member.name, f"_default_{member.name}", member.name
        if member.kw_only and "*" not in parameters:
            parameters.append("*")
        if member.default_factory is not MISSING:
            known[default] = member.default_factory
            parameters.append(f"{name}=_missing")
            value = f"{default}() if {name} is _missing else {name}"
        elif member.default is not MISSING:
            known[default] = member.default
            parameters.append(f"{name}={default}")
        else:
            parameters.append(name)
        values.append(f"{name!r}: {value}")
    after = "self.__post_init__()" if hasattr(cls, "__post_init__") else ""
    exec(f"def __init__({', '.join(parameters)}): _set(self, '__dict__', {{{', '.join(values)}}}); {after}", known)
    init: Callable[..., None] = known["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    return init
