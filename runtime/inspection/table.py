"""The results of an inspection as text tables."""

from collections import Counter
from collections.abc import Iterator, Sequence

from specc.runtime.inspection.inspect import Inspection
from specc.runtime.tables import spaced

SHOWN = 16  # the maximum number of experts of a layer in a table


def tables(result: Inspection) -> Iterator[str]:
    """Yields a text table for each measured part of the inspection, then the notes about missing results."""
    if result.ranks:
        yield "ranks        of each matrix, from its singular values"
        head = ("matrix", "shape", "largest", "stable rank", "effective rank", "of", "energy in the top")
        yield _aligned(
            head,
            [
                (r.name, f"{r.shape[0]} x {r.shape[1]}", f"{r.largest:.3g}", f"{r.stable_rank:.1f}",
                 f"{r.effective_rank:.1f}", str(r.full), f"{r.energy:.1%} in {r.top}")
                for r in result.ranks
            ],
        )  # fmt: skip
    text = f"{result.rows[0]} rows of {result.rows[1]} tokens" if result.rows else ""
    if result.heads:
        counts = Counter(head.type for head in result.heads)
        yield f"heads        on {text}: {', '.join(f'{count} {name}' for name, count in counts.most_common())}"
        names = ("attention", "head", "previous", "first", "induction", "content", "type")
        yield _aligned(
            names,
            [
                (h.layer, str(h.head), f"{h.previous:.2f}", f"{h.first:.2f}", _number(h.induction, ".2f"),
                 _number(h.content, ".2f"), h.type)
                for h in result.heads
            ],
        )  # fmt: skip
    if result.units:
        yield f"units        of MLPs, on {text}; dead: always zero; weak: always below 1 % of the median"
        yield _aligned(
            ("activation", "units", "dead", "weak", "active"),
            [(u.layer, f"{u.units:,}", f"{u.dead:,}", f"{u.weak:,}", f"{u.active:.1%}") for u in result.units],
        )
    if result.norms:
        yield f"norms        root mean square of the residual stream, on {text}"
        yield _aligned(
            ("block", "before", "after", "growth", "change"),
            [
                (
                    n.block,
                    _number(n.before, ".3g"),
                    f"{n.after:.3g}",
                    _number(n.growth, ".3f"),
                    _number(n.change, ".3f"),
                )
                for n in result.norms
            ],
        )
    if result.experts:
        yield "experts      share of the tokens of each expert in %, by kind of documents"
        shown = min(max(len(row.loads) for row in result.experts), SHOWN)
        yield _aligned(
            ("layer", "kind", "largest / mean", "differs", *map(str, range(shown))),
            [
                (e.layer, e.kind, f"{e.largest:.2f}", _number(e.differs, ".3f"),
                 *(f"{100 * load:.1f}" for load in e.loads[:shown]), *[""] * (shown - len(e.loads)))
                for e in result.experts
            ],
        )  # fmt: skip
        if (most := max(len(row.loads) for row in result.experts)) > SHOWN:
            yield f"note         experts: {SHOWN} of {most:,} experts are shown; --json has all"
    if result.sensitivity:
        assert result.scored is not None
        over = f"{result.scored['tokens']:,} tokens at {result.scored['bpb']:.4f} bits per byte"
        yield f"sensitivity  increase in bits per byte if only this matrix is quantized, on {over}"
        yield _aligned(
            ("matrix", "scheme", "MSE", "measured", "estimated", "ratio"),
            [
                (
                    s.name,
                    s.scheme,
                    f"{s.mse:.2e}",
                    f"{s.rise:+.6f}",
                    _number(s.estimate, "+.6f"),
                    _number(s.ratio, ".2f"),
                )
                for s in sorted(result.sensitivity, key=lambda s: -s.rise)
            ],
        )
    for place, note in result.notes.items():
        yield f"note         {place}: {note}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return spaced([head, *rows])
