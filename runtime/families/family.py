"""The interface of a family of decoders: the conversions between configs and specs, and the names of tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specc.compiler.architectures.decoder import Decoder
from specc.runtime.families.config import Config
from specc.runtime.families.tensors import Row

Data = dict[str, Any]


class NotOfFamily(Exception):
    """Raised if a spec lacks a part that every model of the family has.

    Attributes:
        distance: the distance of the model from the family. Each differing field counts as 1.
    """

    def __init__(self, message: str, distance: int = 100) -> None:
        super().__init__(message)
        self.distance = distance


@dataclass(frozen=True)
class Family:
    """One family of decoders.

    Attributes:
        name: `model_type` in config.json.
        title: the name in messages and pages.
        architecture: the class of Transformers.
        model: a function that converts a config to the `model` section of a spec, as data without defaults.
        config: a function that converts a model to the fields of a config, which the caller checks with `model`. It
            raises NotOfFamily.
        table: a function that returns the table rows of all tensors that a model with a given config can have.
        buffers: patterns that match the names of tensors without parameters, which files of older versions contain.
        prefix: a prefix of tensor names. Files that contain the model without its head omit this prefix.
    """

    name: str
    title: str
    architecture: str
    model: Callable[[Config], Data]
    config: Callable[[Decoder], Data]
    table: Callable[[Config], Sequence[Row]]
    buffers: tuple[str, ...] = ()
    prefix: str = ""


def families() -> Mapping[str, Family]:
    """Returns all families by name."""
    from specc.compiler.catalog import catalog
    from specc.runtime import families as package

    return catalog(package, Family)
