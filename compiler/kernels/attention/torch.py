"""Attention and its gradient on the CPU, computed by Torch's own attention kernel."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, NamedTuple

from specc.compiler.expr import Const, score_text, torch_text, variables
from specc.compiler.expr.mask import Mask
from specc.compiler.expr.python_lines import INSIDE, fitted, operand
from specc.compiler.expr.score import Score
from specc.compiler.kernels.attention.attention import attention_function, inputs_of, is_gradient, table_name, unequal
from specc.compiler.kernels.generated import GeneratedFunction, number_of, python_file
from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.ops.attention import ScoreFields
from specc.compiler.ops.pointwise import CASTS
from specc.compiler.ops.saved_attention import (
    CausalAttention,
    CausalAttentionGrad,
    ScoredAttention,
    ScoredAttentionGrad,
    SeenAttention,
    SeenAttentionGrad,
    SeenOp,
)


class PlainContext(NamedTuple):
    """The context of templates/torch/attention_cpu.py.jinja. `sees` states whether the function reads `seen`, a
    padding mask."""

    op: GeneratedFunction
    backward: bool
    sees: bool


class CpuKernel(Kernel):
    """The base class of kernels that run only on the CPU."""

    RANK: ClassVar[int] = 9
    portable: ClassVar[bool] = False

    def rejects(self, site: Site) -> str | None:
        if "gpu" in site.target.features:
            return f"is Torch's kernel for the CPU, and not for {site.target.name}"
        return None


class AttentionTorch(CpuKernel):
    """Accepts heads of any size. Keys and values must have the same number of channels."""

    def rejects(self, site: Site) -> str | None:
        return CpuKernel.rejects(self, site) or unequal(site)

    def render(self, site: Site) -> Rendered:
        op = attention_function(site, f"{site.node.op.words} by Torch's kernel for the CPU")
        context = PlainContext(op, is_gradient(site), isinstance(site.node.op, SeenOp))
        return python_file(op, "torch/attention_cpu.py.jinja", context)


ATTENTION_TORCH = AttentionTorch("attention_torch", "torch", computes=CausalAttention)
ATTENTION_GRAD_TORCH = AttentionTorch("attention_grad_torch", "torch", computes=CausalAttentionGrad)
SEEN_TORCH = AttentionTorch("seen_attention_torch", "torch", computes=SeenAttention)
SEEN_GRAD_TORCH = AttentionTorch("seen_attention_grad_torch", "torch", computes=SeenAttentionGrad)


class ScoredContext(NamedTuple):
    """The context of templates/torch/scored_attention_cpu.py.jinja. `lines` are the body of the function."""

    op: GeneratedFunction
    lines: tuple[str, ...]

    @property
    def functional(self) -> bool:
        """Whether the lines call torch.nn.functional."""
        return any("F." in line for line in self.lines)


class ScoredTorch(CpuKernel):
    """Attention with a score and a mask, and its gradient. The kernel computes all scores of a sequence at once."""

    RANK: ClassVar[int] = 10

    def render(self, site: Site) -> Rendered:
        op = attention_function(site, f"{site.node.op.words}, with all scores in memory")
        statements = (*_scores(site), *(_backward(site) if is_gradient(site) else _forward(site)))
        lines = tuple(line for statement in statements for line in fitted(statement, INSIDE))
        return python_file(op, "torch/scored_attention_cpu.py.jinja", ScoredContext(op, lines))


def _form(site: Site) -> ScoreFields:
    op = site.node.op
    return op if isinstance(op, ScoreFields) else ScoreFields()


def _parsed(site: Site) -> tuple[Score, Mask]:
    score, mask = _form(site).parsed(number_of(inputs_of(site)["q"].shape[-2]))
    return replace(score, reads=tuple(replace(read, table=table_name(read.table)) for read in score.reads)), mask


def _scale(site: Site) -> str:
    scale = _form(site).scale
    return "/ q.shape[3] ** 0.5" if scale is None else f"* {scale!r}"


def _scores(site: Site) -> Iterator[str]:
    score, mask = _parsed(site)
    operands = "dy, q, k, v, y" if is_gradient(site) else "q, k, v"
    yield f"{operands} = (x.transpose(1, 2){_cast(site, 'f32')} for x in ({operands}))"
    yield "shared = q.shape[1] // k.shape[1]"
    yield "k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))"
    yield "position = torch.arange(q.shape[2], device=q.device)"
    yield "i, j = position[:, None], position"
    reads = {name for read in score.reads for index in read.indices for name in variables(index)}
    if "h" in reads | set(variables(score.value)) | set(variables(mask.condition)):
        yield "h = torch.arange(q.shape[1], device=q.device)[:, None, None]"
    start = {"start": "start[:, None, :, None]"}
    yield f"seen = {torch_text(mask.condition, start, whole=True)}"
    yield f"s = q @ k.mT {_scale(site)}"
    value = "s" if score.plain else f"({score_text(score.value, score.elements())})"
    yield f"score = {value}.masked_fill(~seen, -torch.inf)"


def _cast(site: Site, dtype: str) -> str:
    """Returns the call that casts a tensor to a dtype; empty if all tensors of the kernel are f32."""
    return "" if inputs_of(site)["q"].dtype == "f32" else f".{CASTS[dtype]}()"


def _forward(site: Site) -> Iterator[str]:
    if _form(site).sinks:
        yield "everything = torch.cat((score, sinks[:, None, None].expand(*s.shape[:3], 1)), -1)"
        yield "lse = everything.logsumexp(-1)"
    else:
        yield "lse = score.logsumexp(-1)"
        yield "lse = lse.masked_fill(lse == -torch.inf, 0.0)  # a query that attends to no key"
    yield "y = (score - lse[..., None]).exp() @ v"
    yield f"return y.transpose(1, 2){_cast(site, inputs_of(site)['q'].dtype)}, lse"


def _backward(site: Site) -> Iterator[str]:
    op, (score, _) = _form(site), _parsed(site)
    yield "p = (score - lse[..., None]).exp()"
    yield "delta = (dy * y).sum(-1, keepdim=True)"
    yield "dv = p.mT @ dy"
    yield "dscore = p * (dy @ v.mT - delta)"
    back = _cast(site, inputs_of(site)["q"].dtype)
    results = [f"{name}.transpose(1, 2){back}" for name in ("dq", "dk", "dv")]
    if op.sinks:
        yield "dsinks = -((sinks[:, None] - lse).exp() * delta[..., 0]).sum((0, 2))"
        results.append("dsinks")
    elements = score.elements()
    for table in map(table_name, op.tables):
        yield f"d{table} = torch.zeros({table}.numel(), dtype=torch.float64, device=q.device)"
        for read, slope in zip(score.reads, score.slopes, strict=True):
            if read.table != table:
                continue
            flat = ""
            for dim, text in enumerate(read.index_texts()):
                flat = f"{operand(flat)} * {table}.shape[{dim}] + {text}" if flat else text
            factor = f"(dscore * ({score_text(slope, elements)}))" if slope != Const(1) else "dscore"
            yield f"index = torch.where(seen, {flat}, 0).expand(s.shape)"
            yield f"weights = {factor}.double()"
            yield f"d{table} += torch.bincount(index.flatten(), weights.flatten(), len(d{table}))"
        results.append(f"d{table}.view({table}.shape).float()")
    if score.slope != Const(1):
        yield f"dscore = dscore * ({score_text(score.slope, elements)})"
    yield f"dq, dk = dscore @ k {_scale(site)}, dscore.mT @ q {_scale(site)}"
    yield "dk, dv = (x.unflatten(1, (-1, shared)).sum(2) for x in (dk, dv))"
    yield f"return {', '.join(results)}"


SCORED_TORCH = ScoredTorch("scored_attention_torch", "torch", computes=ScoredAttention)
SCORED_GRAD_TORCH = ScoredTorch("scored_attention_grad_torch", "torch", computes=ScoredAttentionGrad)
UNEQUAL_TORCH = ScoredTorch("unequal_attention_torch", "torch", computes=CausalAttention)
UNEQUAL_GRAD_TORCH = ScoredTorch("unequal_attention_grad_torch", "torch", computes=CausalAttentionGrad)
