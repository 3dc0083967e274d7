"""Two parts of a report: optimizer updates, and decoding by text models."""

from specc.runtime.bench.decode_text import TextDecoding
from specc.runtime.bench.optimizer import Updates

NONE = "-"


def update_lines(updates: Updates) -> list[str]:
    heads = ("tensors", "numbers", "ms", "±", "of step", "of fused", "floor ms", "of it")
    lines = [f"{'optimizer':<36}" + "".join(f"{head:>10}" for head in heads)]
    for row in updates.rows:
        cells = (
            f"{row.tensors:,}",
            f"{row.numbers / 1e6:.4g} M",
            f"{row.update.ms:.4g}",
            f"{row.update.spread:.1%}",
            f"{updates.of_step(row):.2%}",
            f"{updates.over_fused(row):.2f}x",
            f"{row.floor_ms:.3g}",
            f"{row.share_of_floor:.0%}",
        )
        name = row.name if len(row.name) < 36 else f"{row.name[:32]}..."
        lines.append(f"{name:<36}" + "".join(f"{cell:>10}" for cell in cells))
    return [
        *lines,
        f"Consecutive updates, wall time. of step: share of a training step of {updates.step.ms:.4g} ms. The",
        "update as trained also writes the copies in the compute dtype and the averaged weights. of fused: divided by",
        "the time of Torch's fused AdamW. floor: weights, gradients and state read once, weights and state written",
        "once. Small models stay in the cache, and can be faster.",
    ]


def decode_lines(decoding: TextDecoding) -> list[str]:
    heads = ("batch", "context", "tokens/s", "ms/token", "±", "floor ms", "of it", "first s", "error")
    lines = [f"{f'decode, {decoding.dtype}':<30}" + "".join(f"{head:>10}" for head in heads)]
    for row in decoding.rows:
        cells = (
            f"{row.batch:,}",
            f"{row.context:,}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.token.ms:.4g}",
            f"{row.token.spread:.1%}",
            f"{row.floor_ms:.3g}",
            f"{row.share_of_floor:.1%}",
            f"{row.first:.1f}",
            NONE if row.error is None else f"{row.error:.1e}",
        )
        lines.append(f"{row.decoder:<30}" + "".join(f"{cell:>10}" for cell in cells))
    lines += [f"not measured: {reason}" for reason in decoding.missing.values()]
    tokens = " or ".join(f"{count}" for count in sorted({row.tokens for row in decoding.rows}))
    lines += [
        f"Greedy decoding of the last {tokens} tokens of texts that end with `context` tokens, two passes after an",
        "untimed pass. ms/token: of a step, which decodes one token of each text. floor: weights and cache read once,",
        "or the operations, at the ceilings above. of it: the floor divided by the time. first: the additional time of",
        "the untimed pass, which compiles and captures. error: of logits against those of the contiguous cache,",
        "relative to the largest.",
    ]
    if not decoding.trained:
        lines.append("The weights are random; --weights selects others. They do not change the time.")
    return lines
