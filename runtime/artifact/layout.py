"""The arrays of an artifact, as they follow from a spec."""

from collections.abc import Mapping

from specc.compiler.quant.scheme import Scheme, Stored

Layout = tuple[tuple[str, Stored], ...]


def layout(schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """The stored arrays of parameters of `shapes`, in the order of `schemes`."""
    return tuple((name, stored) for name, scheme in schemes.items() for stored in scheme.stored(shapes[name]))
