"""Records behave as frozen dataclasses of the standard library."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import KW_ONLY, FrozenInstanceError, asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

import pytest

from specc.compiler.records import record


class Plain:
    """A pair with defaults of each form."""

    unit: ClassVar[str] = "m"
    first: int
    second: float = 1.5
    names: list[str] = field(default_factory=list, compare=False)
    hidden: str = field(default="", repr=False)
    _: KW_ONLY
    key: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.first + self.second)


@record
class Pair(Plain):
    first: int
    second: float = 1.5
    names: list[str] = field(default_factory=list, compare=False)
    hidden: str = field(default="", repr=False)
    _: KW_ONLY
    key: tuple[int, ...] = ()


@record
class Triple(Pair):
    third: str = "c"


@record
class Empty:
    pass


@record
class Single:
    value: Any


def both(body: type) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A record and a frozen dataclass with the fields of a class."""
    inside = {name: value for name, value in vars(body).items() if name not in ("__dict__", "__weakref__")}
    record_of, dataclass_of = (type("Both", body.__bases__, dict(inside)) for _ in range(2))
    return record(record_of), dataclass(frozen=True)(dataclass_of)


CALLS: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
    ((1,), {}),
    ((1, 2.5, ["a"], "h"), {"key": (3,)}),
    ((), {"first": 1, "second": 2.5, "key": (4,)}),
    ((2,), {"names": ["b"]}),
)


@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_instances_are_those_of_a_dataclass(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    ours, theirs = (made(*args, **kwargs) for made in both(Plain))
    assert repr(ours) == repr(theirs)
    assert asdict(ours) == asdict(theirs)
    assert ours.total == theirs.total == ours.first + ours.second
    assert hash(ours) == hash(theirs)
    assert [member.name for member in fields(ours)] == [member.name for member in fields(theirs)]
    assert ours.__match_args__ == theirs.__match_args__
    assert asdict(replace(ours, second=7.0)) == asdict(replace(theirs, second=7.0))
    assert ours != theirs  # instances of different classes differ


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, 2.0, [], "", (3,)), {}), ((1,), {"first": 1}), ((1,), {"other": 1})]
)
def test_arguments_that_a_dataclass_refuses_are_refused(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    ours, theirs = both(Plain)
    with pytest.raises(TypeError) as expected:
        theirs(*args, **kwargs)
    with pytest.raises(TypeError) as refused:
        ours(*args, **kwargs)
    assert str(refused.value) == str(expected.value)


def test_equality_compares_the_class_and_the_compared_fields() -> None:
    assert Pair(1, names=["a"]) == Pair(1, names=["b"])
    assert hash(Pair(1, names=["a"])) == hash(Pair(1, names=["b"]))
    assert Pair(1) != Pair(2)
    assert Pair(1, hidden="a") != Pair(1, hidden="b")
    assert Pair(1) != Triple(1)
    assert Pair(1) != (1, 1.5)
    assert Pair.__eq__(Pair(1), 1) is NotImplemented  # type: ignore[comparison-overlap]
    assert Empty() == Empty()
    assert {Empty(), Empty()} == {Empty()}
    assert Single(float("nan")) != Single(float("nan"))
    assert Single([1]) == Single([1])
    with pytest.raises(TypeError, match="unhashable"):
        hash(Single([1]))


def test_instances_cannot_change() -> None:
    pair = Pair(1)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'first'"):
        pair.first = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'first'"):
        del pair.first
    assert pair.first == 1


def test_default_factories_run_for_each_instance() -> None:
    assert Pair(1).names is not Pair(1).names


def test_subclasses_have_the_fields_of_their_bases() -> None:
    triple = Triple(1, third="d", key=(2,))
    assert repr(triple) == "Triple(first=1, second=1.5, names=[], key=(2,), third='d')"
    assert replace(triple, first=3) == Triple(3, third="d", key=(2,))


def test_a_subclass_without_fields_needs_no_decorator() -> None:
    class Base:
        value: int

    class Later(record(Base)):  # type: ignore[misc]
        pass

    later = Later(value=3)  # the first instance of either class
    assert repr(later).endswith("Later(value=3)")
    assert later == Later(3) != Base(3)  # type: ignore[call-arg]
    assert Base(4).value == 4  # type: ignore[call-arg]


def test_methods_of_the_class_stay() -> None:
    @record
    class Shown:
        value: int

        def __repr__(self) -> str:
            return "shown"

        def __eq__(self, other: object) -> bool:
            return True

    assert repr(Shown(1)) == "shown"
    assert Shown(1) == 5
    assert hash(Shown(1)) == hash(Shown(1))  # as in a frozen dataclass that defines only `__eq__`


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_instances_are_copied_and_pickled(copied: Callable[[Pair], Pair]) -> None:
    pair = Triple(1, 2.0, ["a"], key=(3,))
    again = copied(pair)
    assert again == pair
    assert asdict(again) == asdict(pair)
