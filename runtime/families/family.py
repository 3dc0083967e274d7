"""The interface of a family of decoders."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specc.compiler.architectures.decoder import Decoder
from specc.runtime.families.config import Config
from specc.runtime.families.tensors import TensorMapping

Data = dict[str, Any]


class NotOfFamily(Exception):
    """Raised if a spec lacks a part that every model of the family has.

    Attributes:
        distance: the number of fields in which the model differs from the family.
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
        architecture: the class name in Transformers.
        model: converts a config to the section `model` of a spec, without defaults.
        config: converts a model to the fields of a config. May raise NotOfFamily. The caller converts the fields back
            with `model` to check them.
        table: returns the mappings of all tensors that a model with a given config can have.
        buffers: patterns of tensor names to ignore. Files of older versions contain such tensors.
        prefix: a prefix of tensor names. Files without the output head omit this prefix.
    """

    name: str
    title: str
    architecture: str
    model: Callable[[Config], Data]
    config: Callable[[Decoder], Data]
    table: Callable[[Config], Sequence[TensorMapping]]
    buffers: tuple[str, ...] = ()
    prefix: str = ""


def families() -> Mapping[str, Family]:
    """Returns all families by name."""
    from specc.compiler.catalog import catalog
    from specc.runtime import families as package

    return catalog(package, Family)
