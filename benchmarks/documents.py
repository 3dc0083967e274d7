"""Times of attention within documents on a GPU, forward and backward: only the blocks that some token sees, all scores
masked, and plain causal attention. `python benchmarks/documents.py` prints a table."""

import statistics
from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional as F

from specc.compiler.render.jinja import exists, render
from specc.compiler.render.model import OpContext

B, T, HEADS, GROUPS, CHANNELS = 48, 2048, 8, 4, 64  # gpt_mlp35's
NUMBERS = count()


def function(name: str, blocks: bool = True) -> Callable[..., Tensor]:
    """A function of the generated code; without `blocks`, in the form that masks all scores."""
    template = f"torch/ops/{name}.py.jinja"
    if exists(template):
        text = render(template, OpContext(f"documents_{next(NUMBERS)}"), "", "")
    else:
        text = render(f"torch/{name}.py.jinja", None, "", "")
    scope: dict[str, object] = {"torch": torch, "Tensor": Tensor, "F": F}
    exec(text if blocks else text.replace("torch.compiler.is_compiling()", "False"), scope)
    return scope[name]  # type: ignore[return-value]


def milliseconds(attend: Callable[..., Tensor], **masks: object) -> float:
    """The median of 15 passes forward and backward, compiled."""
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, GROUPS, GROUPS, HEADS)
    q, k, v, dy = (torch.randn(B, T, n, CHANNELS, generator=generator).cuda().bfloat16() for n in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    compiled = torch.compile(attend, fullgraph=True, dynamic=False)
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.autograd.grad(compiled(*inputs, **masks), inputs, dy)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[5:])


def main() -> None:
    blocks, masked = function("attend_since"), function("attend_since", blocks=False)
    print("| | blocks | masked |\n|---|---|---|")
    print(f"| plain causal | {milliseconds(function('attend')):.3f} | |")
    generator = torch.Generator().manual_seed(1)
    for mean in (100, 300, 1000, T * B * T):
        marks = torch.rand(B, T, generator=generator) * mean < 1
        starts = torch.where(marks, torch.arange(T), 0).cummax(1).values.cuda()
        words = f"documents of {mean:,} tokens" if mean < T else "one document"
        print(f"| {words} | {milliseconds(blocks, starts=starts):.3f} | {milliseconds(masked, starts=starts):.3f} |")
    print(f"| a window of 512 | {milliseconds(blocks, window=512):.3f} | {milliseconds(masked, window=512):.3f} |")


if __name__ == "__main__":
    main()
