"""Small versions of specs, for a first run on a CPU."""

from collections.abc import Sequence
from typing import Any

from specc.compiler.build import plan_loaded
from specc.compiler.errors import SpeccError, SpecError
from specc.compiler.spec.check import load
from specc.compiler.spec.data.text import BYTE_IDS
from specc.compiler.spec.spec import Spec
from specc.compiler.strict import Path
from specc.compiler.text.round_trip import editable, edited, flow, without_comment

CPU = "cpu"
CONTEXT = 128
ROWS = 4  # tokens per step, for a model of text
LINE_ROWS = 32  # rows per step, for a model of lines
STEPS = 20
LINES = 2000  # training lines, if the data is generated
SCORED = 4096  # the number of tokens that a validation scores
SEQUENCES = 32  # the number of windows that calibrate the quantization
LEAST_LAYERS = 2
FEATURES = (128, 192, 256, 384, 512)  # the candidate sizes of the residual stream


def small_version(text: str, name: str) -> str:
    """Returns the text of a spec with small sizes. A run takes a minute on a CPU and needs no files.

    Tokens are bytes, rows have 128 tokens, and the run has 20 steps. A decoder has the fewest layers, then the fewest
    features, with which the spec is valid. Everything else is unchanged. Comments stay, except comments on changed
    values.

    Args:
        text: the text of a valid spec.
        name: the name of the spec, for the comment at the top of the result.

    Raises:
        SpecError: if the spec is invalid.
        SpeccError: if the spec is not valid with any small sizes.
    """
    spec, source = load(text)
    data = editable(source.text)
    _put(data, ("targets",), [CPU])
    _shorten(data["train"], spec)
    if "calibrate" in (data.get("quant") or {}):
        _put(data, ("quant", "calibrate", "sequences"), SEQUENCES)
    if spec.model.reads == "text":
        _read_bytes(data, spec)
    choices: tuple[tuple[Path, Sequence[int]], ...] = (
        (("model", "blocks", "count"), range(LEAST_LAYERS, 1000)),
        (("model", "dim"), FEATURES),
    )
    for path, smaller in choices:
        _choose(data, path, smaller)
    try:
        _plan(data)
    except SpecError as error:
        hint = "copy it without --small, and change sizes by hand"
        raise SpeccError(f"{name} has no small version: {error.diagnostics[0].message}", hint) from None
    lines = edited(data).splitlines(keepends=True)
    first = sum(line.startswith("# yaml-language-server:") for line in lines[:1])
    note = f"# {name} with small sizes, for a first run on a CPU. All other comments are those of {name}.\n"
    return "".join((*lines[:first], note, *lines[first:]))


def _shorten(train: Any, spec: Spec) -> None:
    rows = ROWS if spec.model.reads == "text" else LINE_ROWS
    for key in ("context", "validate_every"):
        train.pop(key, None)
    if spec.train.data.generated:
        _put(train, ("data", "lines"), LINES)
    for key, size in (("micro_batch", rows), ("batch", rows), ("tokens_per_step", rows * CONTEXT)):
        if key in train:
            _put(train, (key,), size)
    if "budget_seconds" in train:
        train.insert(list(train).index("budget_seconds"), "steps", STEPS)
        del train["budget_seconds"]
    _put(train, ("steps",), STEPS)
    schedule: Any = train.get("schedule") or {}
    for part, share in (("warmup", 0.1), ("warmdown", 0.5)):
        if f"{part}_steps" in schedule:
            place = list(schedule).index(f"{part}_steps")
            del schedule[f"{part}_steps"]
            schedule.insert(place, f"{part}_fraction", share)
    _put(train, ("validate_tokens",), SCORED)


def _read_bytes(data: Any, spec: Spec) -> None:
    order = {key: data["train"]["data"][key] for key in ("order",) if key in data["train"]["data"]}
    _put(data, ("train", "data"), {"tokenizer": "bytes", **order})
    _put(data, ("model", "vocab"), BYTE_IDS)
    _put(data, ("model", "context"), min(spec.model.window, CONTEXT))
    for path, _ in spec.marks:
        if _part(data, path[:-1]).get(path[-1]) is not None:  # an unset field takes its id from another field
            _put(data, path, BYTE_IDS - 1)


def _choose(data: Any, path: Path, smaller: Sequence[int]) -> None:
    """Changes the number at `path` in the spec `data` to the first value of `smaller` with which the spec is valid. The
    number does not change if no smaller value is valid, or if the spec does not set the number."""
    part = _part(data, path[:-1])
    if (full := part.get(path[-1])) is None:
        return
    for value in smaller:
        if value >= full:
            break
        _put(part, path[-1:], value)
        try:
            _plan(data)
        except SpecError:
            continue
        return
    _put(part, path[-1:], full)


def _plan(data: Any) -> None:
    spec, source = load(edited(data))
    plan_loaded(spec, source)


def _part(data: Any, path: Path) -> Any:
    for key in path:
        data = (data[key] if isinstance(key, int) else data.get(key)) or {}
    return data


def _put(data: Any, path: Path, value: Any) -> None:
    part = _part(data, path[:-1])
    if part.get(path[-1]) == value:
        return
    part[path[-1]] = flow(value)
    without_comment(part, path[-1])
    if path[1:] and part.fa.flow_style():
        without_comment(_part(data, path[:-2]), path[-2])
