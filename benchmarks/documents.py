"""Times of attention within documents on a GPU, forward and backward: only the blocks that some token sees, all scores
masked, and plain causal attention. `python benchmarks/documents.py` prints a table."""

from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional as F

from specc.compiler.render.jinja import exists, render
from specc.compiler.render.model import OpContext
from specc.runtime.bench.timing import alternate

B, T, HEADS, GROUPS, CHANNELS = 48, 2048, 8, 4, 64  # gpt_mlp35's
NUMBERS = count()


def function(name: str, blocks: bool = True) -> Callable[..., Tensor]:
    """Returns a function of the generated code; without `blocks`, the form that masks all scores."""
    template = f"torch/ops/{name}.py.jinja"
    if exists(template):
        text = render(template, OpContext(f"documents_{next(NUMBERS)}"), "", "")
    else:
        text = render(f"torch/{name}.py.jinja", None, "", "")
    scope: dict[str, object] = {"torch": torch, "Tensor": Tensor, "F": F}
    exec(text if blocks else text.replace("torch.compiler.is_compiling()", "False"), scope)
    return scope[name]  # type: ignore[return-value]


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, GROUPS, GROUPS, HEADS)
    q, k, v, dy = (torch.randn(B, T, n, CHANNELS, generator=generator).cuda().bfloat16() for n in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def passes(attend: Callable[..., Tensor], **masks: object) -> Callable[[], object]:
        compiled = torch.compile(attend, fullgraph=True, dynamic=False)
        return lambda: torch.autograd.grad(compiled(*inputs, **masks), inputs, dy)

    blocks, masked = function("attend_since"), function("attend_since", blocks=False)
    rows: dict[str, dict[str, object]] = {}
    generator.manual_seed(1)
    for mean in (100, 300, 1000, T * B * T):
        marks = torch.rand(B, T, generator=generator) * mean < 1
        starts = torch.where(marks, torch.arange(T), 0).cummax(1).values.cuda()
        rows[f"documents of {mean:,} tokens" if mean < T else "one document"] = {"starts": starts}
    rows["a window of 512"] = {"window": 512}
    calls = {"plain causal": passes(function("attend"))}
    for name, masks in rows.items():
        calls |= {f"{name}, blocks": passes(blocks, **masks), f"{name}, masked": passes(masked, **masks)}
    times = alternate(calls, dy.device, sum(tensor.nbytes for tensor in (*inputs, dy)))
    print("| | blocks | masked |\n|---|---|---|")
    print(f"| plain causal | {times['plain causal'].ms:.3f} | |")
    for name in rows:
        print(f"| {name} | {times[f'{name}, blocks'].ms:.3f} | {times[f'{name}, masked'].ms:.3f} |")


if __name__ == "__main__":
    main()
