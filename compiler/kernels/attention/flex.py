"""Attention with a score and a mask, and its gradient, by Torch's FlexAttention."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, NamedTuple

from specc.compiler.expr import score_text, torch_text, variables
from specc.compiler.expr.mask import sees_itself
from specc.compiler.expr.python_lines import INSIDE, fitted
from specc.compiler.expr.score import Score
from specc.compiler.kernels.attention.attention import REPEATS, inputs_of, table_name, unequal
from specc.compiler.kernels.attention.block_lists import BlockLists
from specc.compiler.kernels.attention.scored_context import Writer, is_gradient, op_of
from specc.compiler.kernels.generated import GeneratedFunction, number_of, python_file
from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.kernels.lines import flowed, listed
from specc.compiler.ops.saved_attention import ScoredAttention, ScoredAttentionGrad
from specc.compiler.records import record

BLOCK = 128  # queries and keys per block, as in FlexAttention's own masks
NARROWEST = 16  # channels of a head
RECOMPUTES = "The forward is computed again, because FlexAttention differentiates only its own calls."


class FlexContext(NamedTuple):
    """The context of templates/torch/flex_attention.py.jinja.

    Attributes:
        how: A sentence that states whether repeated calls return the same bits.
        visible: The first line of the mask function.
        mask: The body of the mask function.
        scored: The first line of the score function. Empty if the score is q k^T times the scale.
        score: The body of the score function.
        seen: The call of the mask function for one query and key.
        scores: The call of the score function for one query and key.
        attend: The first line of the function that calls FlexAttention.
        lines: The body of the function that calls FlexAttention.
        blocks: The lists that select the blocks of scores to compute.
        wanted: The input checks of the generated function.
        gradient: Whether the kernel computes the gradient.
        call: The lines that call the function of `attend`, and return the results.
        fake: The statement that returns outputs without values.
    """

    op: GeneratedFunction
    how: str
    heads: int
    kv_heads: int
    channels: int
    visible: str
    mask: tuple[str, ...]
    scored: str
    score: tuple[str, ...]
    seen: str
    scores: str
    attend: str
    lines: tuple[str, ...]
    blocks: BlockLists
    wanted: tuple[str, ...]
    gradient: bool
    call: tuple[str, ...]
    fake: str

    @property
    def functional(self) -> bool:
        """Whether the lines of the score call torch.nn.functional."""
        return any("F." in line for line in self.score)


@record
class FlexKernel(Kernel):
    """Attention by FlexAttention, for 16-bit heads of at least 16 channels.

    At a site that a Triton kernel also accepts, the plan selects this kernel only if the lock file states that this
    kernel is faster.
    """

    RANK: ClassVar[int] = 7

    def rejects(self, site: Site) -> str | None:
        q = inputs_of(site)["q"]
        if q.dtype not in ("bf16", "f16"):
            return f"computes in bf16 or f16, not in {q.dtype}"
        if number_of(q.width) < NARROWEST:
            return f"takes heads of at least {NARROWEST} channels; these have {q.width}"
        if is_gradient(site) and (table := _read_again(op_of(site).parsed(q.shape[-2])[0])):
            return f"differentiates one read of each table; the score reads {table} at several places"
        return unequal(site)

    @property
    def made_of(self) -> str:
        return "FlexAttention"

    def render(self, site: Site) -> Rendered:
        writer, op = Writer(site), op_of(site)
        score, mask = op.parsed(inputs_of(site)["q"].shape[-2])
        further = tuple(map(table_name, op.further))
        reads = [replace(read, table=table_name(read.table)) for read in score.reads]
        elements = {read.variable: f"{read.table}[{', '.join(read.index_texts())}]" for read in reads}
        gradient = is_gradient(site)
        repeats = REPEATS[self.deterministic] if not gradient else f"{RECOMPUTES} {REPEATS[False].partition(':')[0]}."
        context = FlexContext(
            op=writer.function("FlexAttention"),
            how=flowed(repeats),
            heads=writer.heads,
            kv_heads=writer.kv_heads,
            channels=writer.channels,
            visible=_signature("visible", ("i", "j", "h", *(("start",) if op.documents else ()))),
            mask=fitted(f"return {torch_text(mask.condition, whole=True)}", INSIDE),
            scored="" if score.plain else _signature("scored", ("s", "i", "j", "h", *map(table_name, op.tables))),
            score=fitted(f"return {score_text(score.value, elements)}", INSIDE),
            seen=f"visible(i, j, h{', start[row, i]' if op.documents else ''})",
            scores=f"scored({', '.join(('s', 'i', 'j', 'h', *map(table_name, op.tables)))})",
            attend=listed(
                "def attend(",
                [*(f"{name}: Tensor" for name in ("q", "k", "v", *further)), "blocks: list[Tensor]"],
                ") -> tuple[Tensor, Tensor]:",
            ),
            lines=tuple(line for text in _attend(op, score) for line in fitted(text, INSIDE)),
            blocks=BlockLists.of(mask, BLOCK, BLOCK),
            wanted=writer.checks(),
            gradient=gradient,
            call=tuple(line for text in _call(op, further, gradient) for line in fitted(text, 102)),
            fake=writer.fake(),
        )
        return python_file(context.op, "torch/flex_attention.py.jinja", context)


def _read_again(score: Score) -> str | None:
    """Returns a table that the score reads several times, or None if there is no such table."""
    count = Counter(read.table for read in score.reads)
    return next((table for table in count if count[table] > 1), None)


def _reads_keys(score: Score) -> bool:
    return any("j" in variables(index) for read in score.reads for index in read.indices)


def _signature(function: str, names: tuple[str, ...]) -> str:
    return listed(f"def {function}(", [f"{name}: Tensor" for name in names], ") -> Tensor:")


def _attend(op: ScoredAttention | ScoredAttentionGrad, score: Score) -> Iterator[str]:
    settings = ["block_mask=mask", "enable_gqa=True", "return_lse=True"]
    settings += [f"scale={op.scale!r}"] if op.scale is not None else []
    settings += [] if score.plain else ["score_mod=score"]
    # The option FORCE_USE_FLEX_ATTENTION avoids FlexAttention's decoding kernel, which does not terminate. With more
    # than one stage, Triton copies the table elements of the next blocks of keys into shared memory, which is too small
    # for these elements.
    options = ['"FORCE_USE_FLEX_ATTENTION": True', *(['"num_stages": 1'] if _reads_keys(score) else [])]
    settings.append(f"kernel_options={{{', '.join(options)}}}")
    yield f"y, lse = flex_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), {', '.join(settings)})"
    if op.sinks:
        yield "y = (y * torch.sigmoid(lse - sinks[:, None]).unsqueeze(-1)).to(q.dtype)"
        yield "lse = torch.logaddexp(lse, sinks[:, None].float())"
    elif not sees_itself(op.mask):
        yield "lse = lse.masked_fill(lse == -torch.inf, 0.0)  # of a query that attends to no key"
    yield "return y.transpose(1, 2).contiguous(), lse"


def _call(op: ScoredAttention | ScoredAttentionGrad, further: tuple[str, ...], gradient: bool) -> Iterator[str]:
    operands = "q, start" if op.documents else "q"
    yield f"blocks = [*list_blocks({operands}, False), *list_blocks({operands}, True)]"
    names = ", ".join(("q", "k", "v", *further))
    if not gradient:
        yield f"return attend({names}, blocks)"
        return
    learned = [name for name in further if name != "start"]
    sources = ", ".join(("q", "k", "v", *(f"{name}.float()" for name in learned)))
    yield "with recorded():"
    yield f"    leaves = [x.detach().requires_grad_() for x in ({sources})]"
    yield f"    {', '.join(('q', 'k', 'v', *learned))} = leaves"
    yield f"    y, _ = attend({names}, blocks)"
    yield "    gradients = torch.autograd.grad(y, leaves, dy)"
    yield "return tuple(x.contiguous() for x in gradients)"


_NEEDS = frozenset({"gpu", "mma"})
FLEX = FlexKernel("flex_attention", "torch", _NEEDS, ScoredAttention)
FLEX_GRAD = FlexKernel("flex_attention_grad", "torch", _NEEDS, ScoredAttentionGrad, deterministic=False)
