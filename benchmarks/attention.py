"""Times attention on a GPU, forward and backward, in four implementations: the Triton kernels of specc, flash-attn-4
(if it is installed), compiled FlexAttention, and Torch's causal attention. `python benchmarks/attention.py [WORD ...]
[--tiles]` prints a table of the rows whose names contain a WORD, or of all rows."""

import importlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from specc.compiler.build import kernel_files
from specc.compiler.expr.mask import bound_mask
from specc.compiler.expr.score import bound_score
from specc.compiler.ir.graph import Node
from specc.compiler.ir.types import TensorType
from specc.compiler.kernels.attention.flash_scored import FLASH_SCORED, FLASH_SCORED_GRAD
from specc.compiler.kernels.attention.scored import SCORED, SCORED_GRAD
from specc.compiler.kernels.kernel import Kernel, Site, symbol
from specc.compiler.ops.attention import Sdpa
from specc.compiler.ops.saved_attention import ScoredAttention, ScoredAttentionGrad
from specc.compiler.render.jinja import render
from specc.compiler.targets import TARGETS
from specc.runtime.bench.timing import alternate

B, T, HEADS, GROUPS, CHANNELS = 48, 2048, 8, 4, 64  # gpt_mlp35's
DOCUMENTS = "j <= i and document(i) == document(j)"
TILES = "--tiles" in sys.argv  # chooses the fastest of the tiles of `specc tune` first
WORDS = [word for word in sys.argv[1:] if word != "--tiles"]


@dataclass(frozen=True)
class Row:
    """A row of the table: attention with the score, mask and tables of a spec. `mean` is the mean number of tokens of a
    document."""

    score: str = "s"
    mask: str = "j <= i"
    tables: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    mean: int = T

    def site(self, backward: bool) -> Site:
        """Returns the site of the forward pass or of the gradient."""
        q, k = (TensorType(("B", "T", count, CHANNELS), "bf16") for count in (HEADS, GROUPS))
        mask = bound_mask(self.mask, HEADS, T)
        score = bound_score(self.score, tuple(self.tables.items()), mask, HEADS, T)
        fields = (score, mask, None, tuple(self.tables), False)
        op = ScoredAttentionGrad(*fields) if backward else ScoredAttention(*fields)
        inputs = (q, q, k, k, q, TensorType(("B", HEADS, "T"), "f32")) if backward else (q, k, k)
        start = (TensorType(("B", "T"), "i64"),) if op.documents else ()
        inputs = (*inputs, *start, *(TensorType(shape, "bf16") for shape in self.tables.values()))
        node = Node("attention", op, tuple(f"v{i}" for i in range(len(inputs))), op.infer(inputs))
        return Site(node, inputs, TARGETS["sm90"], "attention", "benchmark", T)


ROWS = {
    "plain causal": Row(),
    "window of 512": Row(mask="j <= i and i - j < 512"),
    "window of 512 and the first 4 keys": Row(mask="j <= i and (i - j < 512 or j < 4)"),
    "documents of 100 tokens": Row(mask=DOCUMENTS, mean=100),
    "documents of 300 tokens": Row(mask=DOCUMENTS, mean=300),
    "documents of 1,000 tokens": Row(mask=DOCUMENTS, mean=1000),
    "ALiBi": Row("s - slope(h) * (i - j)"),
    "softcap": Row("20 * tanh(s / 20)"),
    "T5 buckets, learned": Row("s + bias[h, bucket(i - j, 32, 128)]", tables={"bias": (HEADS, 32)}),
    "bias by distance, learned": Row("s + bias[h, i - j]", tables={"bias": (HEADS, T)}),
}


def op_of(kernel: Kernel, site: Site, folder: Path) -> Callable[..., Any]:
    """Writes the files of a kernel into a new package of `folder` and returns its function."""
    package = folder / f"kernel_{len(list(folder.iterdir()))}"
    package.mkdir()
    (package / "__init__.py").touch()
    rendered = kernel.render(site)
    for name, text in kernel_files(rendered, "", "benchmarks/attention.py").items():
        (package / name).write_text(text, encoding="utf-8")
    importlib.invalidate_caches()
    return getattr(importlib.import_module(f"{package.name}.{rendered.module}"), symbol(site)[0])  # type: ignore[no-any-return]


def flex(row: Row) -> Callable[..., Tensor]:
    """Returns the function that generated models call if attention is not fused. Under torch.compile, it uses
    FlexAttention."""
    site = row.site(False)
    op = site.node.op
    assert isinstance(op, ScoredAttention)
    call = Sdpa(op.score, op.mask, op.scale, op.tables, op.sinks).call(site.inputs)
    if call.generated is None:
        return attend
    template, context = call.generated
    scope: dict[str, Any] = {"torch": torch, "Tensor": Tensor, "F": F}
    exec(render(template, replace(context, package=f"flex_{id(row)}"), "", ""), scope)  # type: ignore[type-var]
    return scope[call.function]  # type: ignore[no-any-return]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def fastest(kernel: Kernel, site: Site, inputs: Sequence[Tensor], folder: Path) -> Kernel:
    """Returns the variant of a kernel with the fastest tile."""
    variants = dict(enumerate(kernel.variants(site)))
    ops = {str(i): op_of(variant, site, folder) for i, variant in variants.items()}
    calls = {name: lambda op=op: op(*inputs) for name, op in ops.items()}
    times = alternate(calls, inputs[0].device, sum(value.nbytes for value in inputs))
    best = min(times, key=lambda name: times[name].ms)
    return variants[int(best)]


def passes(
    row: Row, kernels: Sequence[Kernel], values: Sequence[Tensor], dy: Tensor, folder: Path
) -> tuple[Callable[[], object], str]:
    """Returns a function that replays the forward and the backward of a pair of kernels as one CUDA graph, and their
    tiles."""
    sites = [row.site(False), row.site(True)]
    attend = op_of(kernels[0], sites[0], folder)
    y, lse = attend(*values)
    inputs = [list(values), [dy, *values[:3], y, lse, *values[3:]]]
    if TILES:
        kernels = [fastest(*each, folder) for each in zip(kernels, sites, inputs, strict=True)]
    attend, gradient = (op_of(kernel, site, folder) for kernel, site in zip(kernels, sites, strict=True))

    def both() -> object:
        y, lse = attend(*values)
        return gradient(dy, *values[:3], y, lse, *values[3:])

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    return graph.replay, "; ".join(kernel.render(site).tile for kernel, site in zip(kernels, sites, strict=True))


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, GROUPS, GROUPS, HEADS)
    *inputs, dy = (torch.randn(B, T, count, CHANNELS, generator=generator).cuda().bfloat16() for count in shapes)
    leaves = [value.clone().requires_grad_() for value in inputs]
    touched = sum(value.nbytes for value in (*inputs, dy))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sys.path.insert(0, name)
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(backend):
                times = alternate({"": lambda: torch.autograd.grad(attend(*leaves), leaves, dy)}, dy.device, touched)
            print(f"plain causal by {backend.name}: {times[''].ms:.3f} ms")
        print("| | Triton | flash-attn-4 | FlexAttention | tiles |\n|---|---|---|---|---|", flush=True)
        for title, row in ROWS.items():
            if WORDS and not any(word in title for word in WORDS):
                continue
            torch.compiler.reset()
            generator.manual_seed(1)
            marks = torch.rand(B, T, generator=generator) * row.mean < 1
            start = torch.where(marks, torch.arange(T), 0).cummax(1).values.cuda()
            tables = [torch.randn(shape, generator=generator).cuda().bfloat16() for shape in row.tables.values()]
            further = [*([start] if row.mask == DOCUMENTS else []), *tables]
            learned = [*leaves, *(table.clone().requires_grad_() for table in tables)]
            compiled = torch.compile(flex(row), fullgraph=True, dynamic=False)
            read = [*learned[:3], *([start] if row.mask == DOCUMENTS else []), *learned[3:]]
            values = [*inputs, *further]
            triton, tiles = passes(row, [SCORED, SCORED_GRAD], values, dy, folder)
            calls: dict[str, Callable[[], object]] = {"Triton": triton}
            flash = [FLASH_SCORED, FLASH_SCORED_GRAD]
            if find_spec("flash_attn") and not any(flash[i].rejects(row.site(bool(i))) for i in range(2)):
                calls["flash-attn-4"], _ = passes(row, flash, values, dy, folder)

            def flexible(compiled: Callable[..., Tensor] = compiled, read: list[Tensor] = read) -> object:
                return torch.autograd.grad(compiled(*read), [leaf for leaf in read if leaf.requires_grad], dy)

            calls["FlexAttention"] = flexible
            times = alternate(calls, dy.device, touched)
            cells = [
                f"{times[name].ms:.3f}" if name in times else "" for name in ("Triton", "flash-attn-4", "FlexAttention")
            ]
            print(f"| {title} | {' | '.join(cells)} | {tiles} |", flush=True)


if __name__ == "__main__":
    main()
