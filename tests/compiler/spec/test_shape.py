"""The models of the spec: all strict; each key, misspelled, is an error with the right suggestion."""

import json
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest

from specc.compiler.architectures.blocks import Change
from specc.compiler.errors import Diagnostic, SpecError
from specc.compiler.spec.check import load
from specc.compiler.spec.messages.expected import Model, alternatives, keys_of, nearest, tag_of
from specc.compiler.spec.spec import Spec
from specc.compiler.strict import StrictModel


def errors_of(text: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(SpecError) as caught:
        load(text)
    return caught.value.diagnostics


def reachable(annotation: Any = Spec, seen: dict[Model, None] | None = None) -> dict[Model, None]:
    """All models that a spec can hold."""
    seen = {} if seen is None else seen
    for one in alternatives(annotation):
        if isinstance(one, type) and issubclass(one, StrictModel):
            if one not in seen:
                seen[one] = None
                for info in one.model_fields.values():
                    reachable(info.annotation, seen)
        elif get_origin(one) in (tuple, dict):
            for inner in get_args(one):
                if inner is not Ellipsis:
                    reachable(inner, seen)
    return seen


def test_every_model_is_strict_frozen_and_closed() -> None:
    found = reachable()
    assert len(found) > 25
    for model in found:
        config = model.model_config
        strict = (config.get("extra"), config.get("frozen"), config.get("strict"), config.get("allow_inf_nan"))
        # the further keys of a change are the names of layers
        extra = "allow" if model is Change else "forbid"
        assert strict == (extra, True, True, False), model.__name__


def example(annotation: Any, key: str = "") -> Any:
    """A value of a type, as JSON has it, of the smallest models."""
    one = next(one for one in alternatives(annotation) if one is not type(None))
    if get_origin(one) is Literal:
        return get_args(one)[0]
    if get_origin(one) is tuple:
        return [example(inner, key) for inner in get_args(one) if inner is not Ellipsis]
    if get_origin(one) is dict:
        return {"blocks.*.mlp": example(get_args(one)[1])}
    if one in (int, float, str, bool):
        return {int: 4, float: 0.5, str: "x", bool: True}[one]
    needed = (name for name, info in keys_of(one).items() if info.is_required() or tag_of(one, name))
    return {name: example(keys_of(one)[name].annotation, name) for name in needed}


def holders(annotation: Any, goal: Model, depth: int = 7) -> Any | None:
    """The smallest data of `annotation` that holds `goal`, with the string "GOAL" for it."""
    if depth == 0:
        return None
    for one in alternatives(annotation):
        if one is goal:
            return "GOAL"
        if get_origin(one) is tuple:
            inner = holders(get_args(one)[0], goal, depth - 1)
            if inner is not None:
                return [inner]
        elif get_origin(one) is dict:
            inner = holders(get_args(one)[1], goal, depth - 1)
            if inner is not None:
                return {"gain": inner}
        elif isinstance(one, type) and issubclass(one, StrictModel):
            for name, info in keys_of(one).items():
                inner = holders(info.annotation, goal, depth - 1)
                if inner is not None:
                    return {**example(one), name: inner}
    return None


def typos(word: str) -> Iterator[str]:
    """A letter dropped, two swapped, one replaced: in the middle, where it hurts most."""
    middle = len(word) // 2
    yield word[:middle] + word[middle + 1 :]
    swap = next((i for i in range(max(0, middle - 1), len(word) - 1) if word[i] != word[i + 1]), 0)
    yield word[:swap] + word[swap : swap + 2][::-1] + word[swap + 2 :]
    yield word[:middle] + ("z" if word[middle] != "z" else "y") + word[middle + 1 :]


def test_three_typos_of_every_key_are_errors_with_the_right_suggestion() -> None:
    asked = right = 0
    wrong: list[str] = []
    for model in (model for model in reachable() if model is not Change):
        frame = json.dumps(holders(Spec, model), indent=1)
        for key, info in keys_of(model).items():
            for typo in typos(key):
                if typo in keys_of(model) or not typo:
                    continue
                body = example(model)
                value = body.pop(key, None)
                body[typo] = example(info.annotation) if value is None else value
                text = frame.replace('"GOAL"', json.dumps(body, indent=1))
                line = next(i for i, row in enumerate(text.split("\n"), 1) if row.strip().startswith(f'"{typo}":'))
                found = errors_of(text)
                tagged = tag_of(model, key) is not None
                # Without its tag nobody can know which member of a union this is: then the tag is missing.
                mine = [
                    one
                    for one in found
                    if one.code in (("S101", "S102") if tagged else ("S101",)) and one.mark.line <= line
                ]
                assert mine, (model.__name__, key, typo, [one.message for one in found])
                asked += 1
                if any(f"`{key}`" in one.hint or f"`{key}:`" in one.hint for one in mine):
                    right += 1
                else:
                    wrong.append(f"{model.__name__}.{key}: {typo}: {mine[0].hint}")
    assert asked > 300
    assert right / asked >= 0.95, wrong


@pytest.mark.parametrize(
    ("word", "choices", "best"),
    [
        ("hed", ["head", "heads", "dim"], "head"),
        ("haed", ["head", "embed"], "head"),
        ("rl", ["lr", "eps"], "lr"),
        ("warmupsteps", ["warmdown_steps", "warmup_steps"], "warmup_steps"),
        ("optimiser", ["optimizers", "schedule"], "optimizers"),
        ("HEADS", ["heads"], "heads"),
        ("banana", ["heads", "dim", "rope"], None),
        ("x" * 500, ["x"], None),
        ("a", [], None),
    ],
)
def test_nearest(word: str, choices: list[str], best: str | None) -> None:
    assert nearest(word, choices) == best
