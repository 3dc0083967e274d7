"""The variants of a scheme among which a bit allocation selects."""

from collections.abc import Sequence

from specc.compiler.quant.scheme import Scheme, SchemeError


def variants(scheme: Scheme, bits: Sequence[int], clip_stds: Sequence[float]) -> tuple[Scheme, ...]:
    """Returns the scheme with each supported number of bits and clip: ascending bits, then descending clip."""
    schemes: list[Scheme] = []
    for width in sorted(set(bits)):
        try:
            wider = scheme.with_bits(width)
        except SchemeError:
            continue
        for clip in sorted(set(clip_stds), reverse=True) or (None,):
            try:
                schemes.append(wider if clip is None else wider.with_clip(clip))
            except SchemeError:
                schemes.append(wider)
    return tuple(dict.fromkeys(schemes))
