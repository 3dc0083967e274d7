"""Finds the changes to a spec after which old checkpoints and artifacts no longer load."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import NamedTuple

from specc.compiler import pipeline
from specc.compiler.errors import Diagnostic, SpecError
from specc.compiler.passes.assign_quant import allocation, storage_name
from specc.compiler.programs.programs import LoweringError, Parameter, Programs
from specc.compiler.spec.check import check, to_diagnostics
from specc.compiler.spec.migrate import upgraded
from specc.compiler.spec.spec import Spec
from specc.compiler.strict import Path
from specc.compiler.text.source import Source, read

CODE = "F008"
_WHOLE_NUMBER = re.compile(r"\b\d+\b")


class Interface(NamedTuple):
    """The properties of a spec on which checkpoints and artifacts of the spec depend.

    Attributes:
        source: The text of the spec.
        programs: The lowered programs, with the parameters.
        storage: The form in which an artifact stores each parameter.
        tokens: The fields that determine the token ids, and their values.
    """

    source: Source
    programs: Programs
    storage: Mapping[str, str]
    tokens: Mapping[str, object]

    @property
    def parameters(self) -> dict[str, Parameter]:
        return {param.name: param for param in self.programs.params}


def interface_of(origin: FilePath | str, name: str) -> Interface:
    """Returns the interface of a spec. Specs of old versions are accepted.

    Args:
        origin: the spec file, or the text of a spec.
        name: the name that messages use for `origin` if `origin` is a text.

    Raises:
        SpecError: if the spec is invalid.
    """
    source = read(origin, name)
    data = upgraded(source.data)
    if data is not source.data:
        source = Source(source.file, source.text, data)
    spec = check(source)
    try:
        programs = pipeline.lower(spec, spec.targets[0])
        schemes = allocation(spec.quant, programs.stored)
    except LoweringError as error:
        raise SpecError(to_diagnostics(error.problems, source), source.texts) from None
    storage = {name: storage_name(scheme) for name, scheme in schemes.items()}
    return Interface(source, programs, storage, _tokens(spec))


def _tokens(spec: Spec) -> dict[str, object]:
    data = spec.train.data
    names = ("kind", "tokenizer", "pattern", "special", "bos")
    fields = {f"train.data.{name}": getattr(data, name, None) for name in names}
    return {"model.reads": spec.model.reads, "model.characters": spec.model.characters, **fields}


def breaking_changes(old: Interface, new: Interface) -> tuple[Diagnostic, ...]:
    """Returns one finding per kind of change. The position of a finding is the line of the new spec that causes the
    change.

    Parameters whose names differ only in numbers, such as the parameters of different layers, share one finding. A new
    activation or learning rate, for example, is not breaking.
    """
    findings: dict[tuple[str, str], list[tuple[str, Path]]] = {}
    for name, path, change in _changes(old, new):
        findings.setdefault((_WHOLE_NUMBER.sub("*", name), change), []).append((name, path))
    return tuple(
        _finding(new.source, pattern if len(places) > 1 else places[0][0], change, places)
        for (pattern, change), places in findings.items()
    )


def _finding(source: Source, subject: str, change: str, places: list[tuple[str, Path]]) -> Diagnostic:
    count = f" ({len(places)} parameters)" if len(places) > 1 else ""
    place = source.place(places[0][1])
    stored = change.startswith("is stored")
    hint = (
        "artifacts of the old spec do not load; quantize and export again"
        if stored
        else "checkpoints and artifacts of the old spec do not load; give the new spec another name, or train it again"
    )
    return Diagnostic(CODE, f"{subject}{count} {change}", hint, place.file, place.mark)


def _changes(old: Interface, new: Interface) -> Iterator[tuple[str, Path, str]]:
    before, after = old.parameters, new.parameters
    for name in sorted(before.keys() - after.keys()):
        yield name, old.programs.place(name), "is removed"
    for name in sorted(after.keys() - before.keys()):
        yield name, new.programs.place(name), "is new"
    for name in sorted(before.keys() & after.keys()):
        place = new.programs.place(name)
        if before[name].shape != after[name].shape:
            yield name, place, f"changes its shape from {[*before[name].shape]} to {[*after[name].shape]}"
        elif (form := old.storage.get(name)) != (other := new.storage.get(name)):
            yield name, ("quant",), f"is stored as {other}, not as {form}"
    for field in sorted(old.tokens.keys() | new.tokens.keys()):
        was, now = old.tokens.get(field), new.tokens.get(field)
        if was != now:
            change = f"changes the ids of tokens: it was {_short(was)}, and is {_short(now)}"
            yield field, tuple(field.split(".")), change


def _short(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
