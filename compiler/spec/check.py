"""Checks a spec and reports all of its problems, each with a code, a position and a hint.

The modules that translate Pydantic's errors are imported only for invalid specs.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any, TypeVar

from pydantic import ValidationError

from specc.compiler.errors import Diagnostic, SpecError
from specc.compiler.spec.spec import Spec
from specc.compiler.spec.version import refuse_old
from specc.compiler.strict import Path, Problem, StrictModel, keys_of
from specc.compiler.text.overrides import apply_overrides
from specc.compiler.text.source import Place, Source, read, step

M = TypeVar("M", bound=StrictModel)


def load(origin: FilePath | str, overrides: Iterable[str] = ()) -> tuple[Spec, Source]:
    """Returns the checked spec, and its source with the position of each value. `origin` is a path, or a text.

    `overrides` are texts `path=value`, which are applied before the check. Raises SpecError with all problems if the
    spec is invalid or has an old version.
    """
    source = read(origin)
    refuse_old(source)
    source = apply_overrides(source, overrides)
    return check(source), source


def load_recorded(path: FilePath, overrides: Iterable[str] = ()) -> tuple[Spec, Source, bool]:
    """Loads the spec of a recorded run. Returns the spec, the source, and whether the file has an old version.

    A spec of an old version is rewritten in memory. `overrides` are texts `path=value`, as in `load`.
    """
    from specc.compiler.spec.migrate import upgraded

    source = read(path)
    data = upgraded(source.data)
    old = data is not source.data
    if old:
        source = Source(source.file, source.text, data)
    source = apply_overrides(source, overrides)
    return check(source), source, old


def check(source: Source) -> Spec:
    """Returns the spec of a source. Raises SpecError with all problems (codes S1xx and S2xx) if the source is
    invalid."""
    return check_as(Spec, source)


def check_as(model: type[M], source: Source) -> M:
    """Returns the data of a source as an instance of `model`. Raises SpecError with all problems if the source is
    invalid."""
    try:
        value = model.model_validate(source.data)
    except ValidationError as error:
        raise SpecError(_diagnostics(model, source, error), source.texts) from None
    if diagnostics := to_diagnostics(problems_of(value), source):
        raise SpecError(diagnostics, source.texts)
    return value


def to_diagnostics(problems: Iterable[Problem], source: Source) -> tuple[Diagnostic, ...]:
    """Returns the problems as diagnostics, with positions in the source.

    A related note is dropped if it is in another file than the problem, such as an override.
    """
    return tuple(_placed(problem, source) for problem in problems)


def problems_of(value: object, path: Path = ()) -> Iterator[Problem]:
    """Yields each problem that involves several fields of one Pydantic model in `value`. The paths of problems begin
    with `path`, the path of `value`."""
    if isinstance(value, StrictModel):
        yield from (problem.under(*path) for problem in value.problems())
        for key, name in zip(keys_of(type(value)), type(value).model_fields, strict=True):
            yield from problems_of(getattr(value, name), (*path, key))
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from problems_of(item, (*path, i))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from problems_of(item, (*path, key))


def _diagnostics(model: type[StrictModel], source: Source, error: ValidationError | None) -> Iterator[Diagnostic]:
    """Yields the diagnostics of an invalid source.

    If the kind of a value is missing or unknown, the value is also checked as the likely kind, so other errors in the
    value are reported too. A likely kind whose name does not resemble the stated kind may be wrong. In this case,
    problems of the surrounding sections are not reported, because these problems could follow from the wrong kind.
    """
    from specc.compiler.spec.messages.expected import places
    from specc.compiler.spec.messages.pydantic_errors import diagnostics_of, likely_kinds

    faulty: frozenset[Path] = frozenset()
    guessed: frozenset[Path] = frozenset()  # the parts with a value whose kind is not certain
    while error is not None:
        models = dict(places(model, source.data))
        diagnostics, paths = diagnostics_of(error, source, models, model)
        likely = likely_kinds(error, source, models, model)
        kinds = {path: kind for path, kind, _ in likely}
        guessed |= {path[:-2] for path, _, similar in likely if not similar}
        faulty |= paths - {path[:-1] for path in kinds}
        unknown = {source.place(path) for path in kinds}
        yield from (each for each in diagnostics if not kinds or Place(each.file, each.mark) in unknown)
        if not kinds:
            break
        source = replace(source, data=_with(source.data, kinds))
        error = _error_of(model, source.data)
    problems = _problems_of_sound_parts(source, dict(places(model, source.data)), faulty | guessed)
    yield from to_diagnostics(problems, source)


def _error_of(model: type[StrictModel], data: object) -> ValidationError | None:
    try:
        model.model_validate(data)
    except ValidationError as error:
        return error
    return None


def _with(data: Any, values: Mapping[Path, object]) -> Any:
    if () in values:
        return values[()]
    inner: dict[Any, dict[Path, object]] = {}
    for (first, *rest), value in values.items():
        inner.setdefault(first, {})[tuple(rest)] = value
    changed = {part: _with((step(data, part) or (None,))[0], at) for part, at in inner.items()}
    if isinstance(data, tuple):
        return tuple(changed.get(i, item) for i, item in enumerate(data))
    return data | changed


def _problems_of_sound_parts(
    source: Source, models: Mapping[Path, type[StrictModel]], faulty: frozenset[Path]
) -> Iterator[Problem]:
    sound: list[Path] = []
    for path, model in models.items():
        broken = any(fault[: len(path)] == path for fault in faulty)
        if broken or any(path[: len(outer)] == outer for outer in sound):
            continue
        data: object = source.data
        for part in path:
            data = data[part]  # type: ignore[index]
        try:
            value = model.model_validate(data)
        except ValidationError:  # reported at another path, because the part may belong to several kinds of model
            continue
        sound.append(path)
        yield from problems_of(value, path)


def _placed(problem: Problem, source: Source) -> Diagnostic:
    place = source.inside(problem.path, problem.offset) if problem.offset else source.place(problem.path)
    near = ((note, source.place(path)) for note, path in problem.related)
    related = tuple((note, at.mark) for note, at in near if at.file == place.file)
    return Diagnostic(problem.code, problem.message, problem.hint, place.file, place.mark, related)
