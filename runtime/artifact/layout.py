"""The layout of an artifact: its stored arrays, derived from the schemes and shapes of the parameters."""

from collections.abc import Mapping

from specc.compiler.quant.scheme import Scheme, Stored

Layout = tuple[tuple[str, Stored], ...]


def layout(schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """Returns the (name, stored array) pairs of parameters with these `shapes`, in the order of `schemes`."""
    return tuple((name, stored) for name, scheme in schemes.items() for stored in scheme.stored(shapes[name]))
