"""The bytes that a decoding step reads, with weights as floats and with weights as the codes of an artifact."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from specc.compiler.passes.decoding.packed_weights import STEP
from specc.compiler.passes.select_kernels import together
from specc.compiler.pipeline import lower, reads_codes, run
from specc.compiler.programs.cost import decode_cost
from specc.compiler.programs.programs import Programs, Rewriting
from specc.compiler.records import record
from specc.compiler.spec.spec import Spec
from specc.compiler.targets import TARGETS


@record
class Decoding:
    """A step that decodes one token of one text, with the GPU kernels for few rows. The programs `floats` read all
    weights as floats of `dtype`. The programs `packed` read codes where a kernel can decode the codes."""

    dtype: str
    floats: Programs
    packed: Programs

    @cached_property
    def float_bytes(self) -> int:
        return decode_cost(self.floats, 1, 0).weights

    @cached_property
    def packed_bytes(self) -> int:
        return decode_cost(self.packed, 1, 0).weights

    @property
    def refused(self) -> tuple[Rewriting, ...]:
        """The products that read float weights in `packed`. The field `refusal` of an entry states why the product does
        not read codes."""
        return tuple(r for r in self.packed.rewritings if r.step == STEP and r.refusal)


def decoding_of(spec: Spec, targets: tuple[str, ...]) -> Decoding | None:
    """Returns the decoding step of a quantized model on the newest GPU among `targets`.

    Returns None if there is no GPU target, or if the model is not quantized, does not generate text, or has integer
    products.
    """
    target = max(targets, key=lambda name: TARGETS[name].arch)
    if not reads_codes(spec, target):
        return None
    programs = lower(spec, target)
    return Decoding(programs.params[0].dtype, programs, run(spec, target, form="packed"))


def decoding_data(decoding: Decoding | None) -> dict[str, Any] | None:
    if decoding is None:
        return None
    floats = [{"nodes": list(rewriting.nodes), "reason": rewriting.refusal} for rewriting in decoding.refused]
    return {"float_bytes": decoding.float_bytes, "artifact_bytes": decoding.packed_bytes, "floats": floats}


def decoding_lines(decoding: Decoding | None) -> Iterator[str]:
    """Yields the lines of `specc plan` about a decoding step. The first line states the bytes that the step reads. Each
    other line states a reason for reading float weights, and the products to which the reason applies."""
    if decoding is None:
        return
    floats, packed = decoding.float_bytes, decoding.packed_bytes
    share = f"{100 * packed / floats:.0f} % of {decoding.dtype}"
    yield f"decoding     {packed:,} bytes of weights per token from an artifact, {share}: {floats:,}"
    reasons: dict[str, list[str]] = {}
    for rewriting in decoding.refused:
        nodes = together(rewriting.nodes)
        reasons.setdefault(rewriting.refusal.removeprefix(f"{nodes}: "), []).append(nodes)
    for reason, alike in reasons.items():
        yield f"  {together(alike)} {'read' if len(alike) > 1 else 'reads'} {decoding.dtype}: {reason}"
