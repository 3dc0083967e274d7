"""The fields of a sweep file."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field

from specc.compiler.errors import quote
from specc.compiler.strict import NonNegative, Path, Problem, StrictModel

SEED = "train.seed"
Title = Annotated[str, Field(min_length=1, max_length=100)]
Override = Annotated[str, Field(min_length=1)]
Seeds = Annotated[tuple[NonNegative, ...], Field(min_length=1)]


class Setting(StrictModel):
    """An entry of the list of settings.

    Attributes:
        name: the name of the setting, which is a part of the names of its run directories.
        set: overrides `path=value`, which are applied after the overrides of the whole sweep.
        seeds: the seeds of this setting; None for the seeds of the sweep.
    """

    name: Title
    set: tuple[Override, ...] = ()
    seeds: Seeds | None = None


class Quantization(StrictModel):
    """An entry of `quantize`: settings for quantizing finished runs of the sweep.

    Attributes:
        name: the name of the entry.
        of: the name of the setting whose runs are quantized; by default the first setting.
        set: overrides `path=value` of the section `quant`.
    """

    name: Title
    of: str | None = None
    set: tuple[Override, ...] = ()


class SweepFile(StrictModel):
    """A sweep of training runs.

    Attributes:
        spec: the path of the spec, relative to the working directory or to the folder of the sweep file.
        data: the data, in the format of `specc train --data`.
        target: the target, as in `specc train --target`.
        set: overrides `path=value` for all runs.
        seeds: the values of `train.seed`. Each setting has one run per seed. By default, the seed of the spec.
        grid: lists of values, by path in the spec. Every combination of values is a setting. If the file also has
            `settings`, each combination of values is combined with each entry of `settings`.
        settings: the list of settings. The table compares all settings with the first setting.
        quantize: the list of settings for quantizing finished runs.
    """

    described: ClassVar[str] = "the sweep"

    spec: Annotated[str, Field(min_length=1)]
    data: Annotated[str, Field(min_length=1)] | None = None
    target: Annotated[str, Field(min_length=1)] | None = None
    set: tuple[Override, ...] = ()
    seeds: Seeds | None = None
    grid: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = Field(default_factory=dict)
    settings: tuple[Setting, ...] = ()
    quantize: tuple[Quantization, ...] = ()

    def problems(self) -> Iterator[Problem]:
        yield from _repeated_names(("settings",), [setting.name for setting in self.settings])
        yield from _repeated_names(("quantize",), [entry.name for entry in self.quantize])
        yield from _repeated_seeds(("seeds",), self.seeds)
        for i, setting in enumerate(self.settings):
            yield from _repeated_seeds(("settings", i, "seeds"), setting.seeds)
            if setting.seeds or self.seeds:
                yield from _set_seeds(("settings", i, "set"), setting.set)
        if self.seeds or any(setting.seeds for setting in self.settings):
            yield from _set_seeds(("set",), self.set)
        if SEED in self.grid:
            message = f"`{SEED}` is not a setting: the table states the spread over seeds"
            yield Problem(("grid", SEED), "S502", message, "list the seeds under `seeds`")


def _repeated_names(path: tuple[str, ...], names: list[str]) -> Iterator[Problem]:
    for i, name in enumerate(names):
        if (first := names.index(name)) < i:
            related: tuple[tuple[str, Path], ...] = (("the first", (*path, first, "name")),)
            message = f"two entries of {path[0]} have the name {quote(name)}"
            yield Problem((*path, i, "name"), "S501", message, "choose another name", related)


def _repeated_seeds(path: Path, seeds: tuple[int, ...] | None) -> Iterator[Problem]:
    for seed, count in Counter(seeds or ()).items():
        if count > 1:
            message = f"the seed {seed} is listed {count} times, but equal runs do not measure the spread"
            yield Problem(path, "S502", message, "list each seed once")


def _set_seeds(path: Path, overrides: tuple[str, ...]) -> Iterator[Problem]:
    for i, text in enumerate(overrides):
        if text.partition("=")[0].strip() == SEED:
            yield _seed_twice((*path, i))


def _seed_twice(path: Path) -> Problem:
    return Problem(path, "S502", f"`{SEED}` is set here and by `seeds`", "remove one of the two")
