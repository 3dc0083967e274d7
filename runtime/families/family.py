"""The interface of a family of decoders."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specc.compiler.architectures.decoder import Decoder
from specc.runtime.families.config import Config
from specc.runtime.families.tensors import TensorMapping

Data = dict[str, Any]


class NotOfFamily(Exception):
    """Raised if a spec lacks a part that every model of a family has.

    Attributes:
        distance: an estimate of the number of fields in which the model differs from the family. The error message for
            the user names the family with the smallest distance.
    """

    def __init__(self, message: str, distance: int = 100) -> None:
        super().__init__(message)
        self.distance = distance


@dataclass(frozen=True)
class Family:
    """One family of decoders.

    Attributes:
        name: the value of `model_type` in config.json.
        title: the name of the family in messages and in the documentation.
        architecture: the name of the model class in Transformers.
        model: converts a config to the section `model` of a spec. The section omits default values.
        config: converts a model to the fields of a config. May raise NotOfFamily. The caller checks the fields by
            converting them back with `model`.
        table: a function that returns the mappings of all tensors that a model with a given config can have.
        buffers: patterns of tensor names to ignore. Older versions of Transformers write tensors with these names.
        prefix: a prefix of tensor names. Files of models without the output head omit this prefix.
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
