"""The models of the spec: all strict; each key, misspelled, is an error with the right suggestion."""

import json
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest

from specc.compiler.architectures.blocks import Change
from specc.compiler.errors import Diagnostic, SpecError
from specc.compiler.spec.check import load
from specc.compiler.spec.messages.expected import Model, alternatives, nearest
from specc.compiler.spec.spec import Spec
from specc.compiler.strict import StrictModel, keys_of, tag_of


def errors_of(text: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(SpecError) as caught:
        load(text)
    return caught.value.diagnostics


def reachable(annotation: Any = Spec, seen: dict[Model, None] | None = None) -> dict[Model, None]:
    """All models that a spec can hold."""
    seen = {} if seen is None else seen
    for alternative in alternatives(annotation):
        if isinstance(alternative, type) and issubclass(alternative, StrictModel):
            if alternative not in seen:
                seen[alternative] = None
                for info in alternative.model_fields.values():
                    reachable(info.annotation, seen)
        elif get_origin(alternative) in (tuple, dict):
            for inner in get_args(alternative):
                if inner is not Ellipsis:
                    reachable(inner, seen)
    return seen


def test_every_model_is_strict_frozen_and_closed() -> None:
    result = reachable()
    assert len(result) > 25
    for model in result:
        config = model.model_config
        strict = (config.get("extra"), config.get("frozen"), config.get("strict"), config.get("allow_inf_nan"))
        # the further keys of a change are the names of layers
        extra = "allow" if model is Change else "forbid"
        assert strict == (extra, True, True, False), model.__name__


def example(annotation: Any, key: str = "") -> Any:
    """A value of a type, as JSON has it, of the smallest models."""
    alternative = next(alternative for alternative in alternatives(annotation) if alternative is not type(None))
    if get_origin(alternative) is Literal:
        return get_args(alternative)[0]
    if get_origin(alternative) is tuple:
        return [example(inner, key) for inner in get_args(alternative) if inner is not Ellipsis]
    if get_origin(alternative) is dict:
        return {"blocks.*.mlp": example(get_args(alternative)[1])}
    if alternative in (int, float, str, bool):
        return {int: 4, float: 0.5, str: "x", bool: True}[alternative]
    needed = (name for name, info in keys_of(alternative).items() if info.is_required() or tag_of(alternative, name))
    return {name: example(keys_of(alternative)[name].annotation, name) for name in needed}


def holders(annotation: Any, goal: Model, depth: int = 7) -> Any | None:
    """The smallest data of `annotation` that holds `goal`, with the string "GOAL" for it."""
    if depth == 0:
        return None
    for alternative in alternatives(annotation):
        if alternative is goal:
            return "GOAL"
        if get_origin(alternative) is tuple:
            inner = holders(get_args(alternative)[0], goal, depth - 1)
            if inner is not None:
                return [inner]
        elif get_origin(alternative) is dict:
            inner = holders(get_args(alternative)[1], goal, depth - 1)
            if inner is not None:
                return {"gain": inner}
        elif isinstance(alternative, type) and issubclass(alternative, StrictModel):
            for name, info in keys_of(alternative).items():
                inner = holders(info.annotation, goal, depth - 1)
                if inner is not None:
                    return {**example(alternative), name: inner}
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
                result = errors_of(text)
                tagged = tag_of(model, key) is not None
                # Without its tag nobody can know which member of a union this is: then the tag is missing.
                matching = [
                    problem
                    for problem in result
                    if problem.code in (("S101", "S102") if tagged else ("S101",)) and problem.mark.line <= line
                ]
                assert matching, (model.__name__, key, typo, [problem.message for problem in result])
                asked += 1
                if any(f"`{key}`" in problem.hint or f"`{key}:`" in problem.hint for problem in matching):
                    right += 1
                else:
                    wrong.append(f"{model.__name__}.{key}: {typo}: {matching[0].hint}")
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
