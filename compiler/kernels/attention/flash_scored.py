"""Attention with a score and a mask, and its gradient, by flash-attn-4. The compiler translates the expressions of the
score and the mask to functions in the CuTe DSL."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from specc.compiler.expr import Call, Const, Expr, cute_text, variables
from specc.compiler.expr.mask import sees_itself
from specc.compiler.expr.python_lines import INSIDE, fitted, operand
from specc.compiler.expr.values import ZERO
from specc.compiler.kernels.attention.attention import (
    DATA_CENTRE,
    FLASH_4,
    FLASH_4_CALLS,
    REPEATS,
    AttentionKernel,
    inputs_of,
    table_name,
)
from specc.compiler.kernels.attention.block_lists import BlockLists
from specc.compiler.kernels.attention.score_lines import Reading
from specc.compiler.kernels.attention.scored_context import Writer, is_gradient, op_of, prefix_reason
from specc.compiler.kernels.generated import GeneratedFunction, python_file
from specc.compiler.kernels.kernel import Rendered, Site
from specc.compiler.kernels.lines import flowed
from specc.compiler.ops.saved_attention import ScoredAttention, ScoredAttentionGrad

# Keys per block; for heads of up to 128 channels, a program instance of flash-attn-4 computes this many keys at a time
KEYS = 128
HOOK_END = "q_idx, kv_idx, seqlen_info, aux_tensors"  # the parameters of hooks; flash-attn-4 passes them by name
FLOATS = {"i": "fi", "j": "fj", "h": "fh"}
HELPERS = {"smaller": "cute.where(x > y, y, x)", "larger": "cute.where(x < y, y, x)"}
_NAMES = re.compile(r"[A-Za-z_]\w*")


class Hook(NamedTuple):
    """A function that flash-attn-4 compiles into its kernel.

    flash-attn-4 distinguishes two hooks only by their source text. The text of a hook therefore contains all numbers on
    which the hook depends. The helper functions that hooks call have the same text in all generated files.

    Attributes:
        signature: The first line of the function.
        doc: The docstring of the function.
        lines: The body of the function.
    """

    signature: str
    doc: str
    lines: tuple[str, ...]


class FlashScoredContext(NamedTuple):
    """The context of templates/torch/flash_scored_attention.py.jinja.

    Attributes:
        how: A description of the algorithm, which states whether repeated calls return the same bits.
        modules: The statements that import modules other than Torch.
        imports: The statements that import flash-attn-4, and the CuTe DSL, which compiles hooks.
        helpers: The functions that hooks call: the name and the return value of each, as text.
        hooks: The functions that compute the score, the gradient of the score, and the mask.
        blocks: The lists of blocks of scores. None if the mask needs no lists.
        wanted: The input checks of the generated function.
        call: The lines that call flash-attn-4 and return its results.
        fake: The return statement of the fake implementation, with outputs that have no values.
    """

    op: GeneratedFunction
    how: str
    heads: int
    kv_heads: int
    channels: int
    modules: tuple[str, ...]
    imports: tuple[str, ...]
    helpers: tuple[tuple[str, str], ...]
    hooks: tuple[Hook, ...]
    blocks: BlockLists | None
    wanted: tuple[str, ...]
    call: tuple[str, ...]
    fake: str


class FlashScored(AttentionKernel):
    """The base class of the forward kernel and the backward kernel. The backward kernel computes the gradients of q,
    k, v and sinks.

    flash-attn-4 returns no gradients for tensors that hooks read. If a score reads learned tables, other kernels
    compute the gradient.
    """

    def rejects(self, site: Site) -> str | None:
        if not DATA_CENTRE & site.target.features:
            return f"has hooks for scores and masks on H100, H200 and B200, and not on {site.target.title}"
        op = op_of(site)
        if is_gradient(site) and op.tables:
            return f"returns no gradient of tables that a score reads; this score reads {', '.join(op.tables)}"
        if is_gradient(site) and (read := _misread(site)):
            return f"passes a wrong {read} to the hooks of the gradient if query heads share keys (4.0.0b36)"
        return prefix_reason(site) or AttentionKernel.rejects(self, site)

    def render(self, site: Site) -> Rendered:
        context = _FlashWriter(site).context(REPEATS[self.deterministic])
        return python_file(context.op, "torch/flash_scored_attention.py.jinja", context)


def _misread(site: Site) -> str | None:
    """Returns the name of a variable for which flash-attn-4 passes a wrong value to the gradient of the score: `i`, the
    query position, or `h`, the head. Returns None if the score reads no such variable.

    flash-attn-4 (4.0.0b36) divides the indices of queries and heads by the number of query heads per key head. The
    division is correct only in a kernel that packs these query heads into one tile. The gradient kernel processes each
    query head separately.
    """
    inputs = inputs_of(site)
    if inputs["q"].shape[-2] == inputs["k"].shape[-2]:
        return None
    score, _ = op_of(site).parsed(inputs["q"].shape[-2])
    read = {*variables(score.value), *variables(score.slope)}
    return next((name for name in ("i", "h") if name in read), None)


class _FlashWriter:
    def __init__(self, site: Site) -> None:
        self.site, self.writer, self.op = site, Writer(site), op_of(site)
        self.score, self.mask = self.op.parsed(inputs_of(site)["q"].shape[-2])
        self.backward = is_gradient(site)
        self.read = (*(("start",) if self.op.documents else ()), *map(table_name, self.op.tables))
        # A program instance of flash-attn-4 on a B200 computes two tiles of 128 queries.
        self.queries = 256 if "tcgen05" in site.target.features else 128

    def context(self, repeats: str) -> FlashScoredContext:
        hooks = tuple(self._hooks())
        text = "\n".join(line for hook in hooks for line in hook.lines)
        helpers = tuple((name, value) for name, value in HELPERS.items() if f"{name}(" in text)
        function = FLASH_4_CALLS[self.backward]
        masked = not self.mask.plain
        return FlashScoredContext(
            op=self.writer.function("flash-attn-4"),
            how=flowed(self._how(masked) + repeats),
            heads=self.writer.heads,
            kv_heads=self.writer.kv_heads,
            channels=self.writer.channels,
            modules=(
                *(("import triton", "import triton.language as tl") if masked else ()),
                "from torch import Tensor",
                *(("from torch.nn import functional as F",) if self.op.documents else ()),
            ),
            imports=(
                *(["import cutlass"] if "cutlass." in text else []),
                *(["from cutlass import cute"] if hooks else []),
                *(["from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch"] if masked else []),
                f"from flash_attn.cute.interface import {function}",
            ),
            helpers=helpers,
            hooks=hooks,
            blocks=BlockLists.of(self.mask, self.queries, KEYS) if masked else None,
            wanted=self.writer.checks(),
            call=tuple(line for text in self._call(function) for line in fitted(text, 102)),
            fake=self.writer.fake(),
        )

    def _how(self, masked: bool) -> str:
        words = "flash-attn-4 compiles the functions below into its kernel. " if masked or not self.score.plain else ""
        if masked:
            words += "Blocks of scores that are all masked are not computed; "
            words += "those of which none is masked are computed without the mask. "
        return words

    def _hooks(self) -> Iterator[Hook]:
        end = f"b, h, {HOOK_END}"
        if not self.score.plain:
            reads = tuple(map(self._element, self.writer.lines.readings))
            doc = "The score of the scaled products s of the query at i and the key at j, in fp32."
            yield _hook(f"score(s, {end})", doc, reads, cute_text(self.score.value, floats=FLOATS))
            if self.backward:
                slope = self.score.slope
                text = "grad" if slope == Const(1) else f"grad * ({cute_text(slope, floats=FLOATS)})"
                yield _hook(f"score_grad(grad, s, {end})", "The gradient of s, from that of the score.", (), text)
        if not self.mask.plain:
            start = ("start = cute.full_like(q_idx, aux_tensors[0][b[0], q_idx[0]])",) if self.op.documents else ()
            doc = "Whether the query at i attends to the key at j."
            yield _hook(f"mask({end})", doc, start, cute_text(self.mask.condition, whole=True))

    def _element(self, reading: Reading) -> str:
        index: Expr = reading.index
        if not set(variables(index)) <= {"h"}:
            index = Call("min", (Call("max", (index, ZERO)), Const(reading.size - 1)))
        text = cute_text(index, whole=True)
        text = f"{operand(text)}[0]" if variables(index) else text
        return f"{reading.name} = cute.full_like(s, aux_tensors[{self.read.index(table_name(reading.table))}][{text}])"

    def _call(self, function: str) -> Iterator[str]:
        settings = [f"softmax_scale={self.op.scale!r}"] if self.op.scale is not None else []
        if self.mask.plain:
            settings.append("causal=True")
        else:
            if self.op.documents:
                yield "start = F.pad(start.int(), (0, -t % QUERIES))  # the last block may exceed the sequence"
            lists = f"list_blocks({'q, start' if self.op.documents else 'q'}, {self.backward})"
            yield f"blocks = BlockSparseTensorsTorch(*{lists}, block_size=(QUERIES, KEYS))"
            settings += ["mask_mod=mask", "block_sparse_tensors=blocks"]
        if not self.score.plain:
            settings += ["score_mod=score", *(["score_mod_bwd=score_grad"] if self.backward else [])]
        if self.read:
            tensors = (name if name == "start" else f"{name}.flatten()" for name in self.read)
            settings.append(f"aux_tensors=[{', '.join(tensors)}]")
        settings += ["learnable_sink=sinks.float()"] if self.op.sinks else []
        if self.backward:
            sinks = ", dsinks" if self.op.sinks else ""
            yield f"dq, dk, dv{sinks} = {function}(q, k, v, y, dy, lse, {', '.join(settings)})"
            yield f"return dq.contiguous(), dk.contiguous(), dv.contiguous(){sinks}"
            return
        yield f"y, lse, *_ = {function}(q, k, v, {', '.join(settings)}, return_lse=True)"
        if not self.op.sinks and not sees_itself(self.op.mask):
            yield "lse = lse.masked_fill(lse == -torch.inf, 0.0)  # of a query that attends to no key"
        yield "return y, lse"


def _hook(signature: str, doc: str, first: tuple[str, ...], value: str) -> Hook:
    names = set(_NAMES.findall("\n".join((*first, value))))
    positions = (("i", "q_idx"), ("j", "kv_idx"))
    lines = [f"{name} = {index}" for name, index in positions if {name, FLOATS[name]} & names]
    lines += [f"{floated} = {name}.to(cutlass.Float32)" for name, floated in FLOATS.items() if floated in names]
    broken = (line for statement in (*first, f"return {value}") for line in fitted(statement, INSIDE))
    return Hook(f"def {signature}:", doc, (*lines, *broken))


_DATA_CENTRE_GPU = frozenset({"tma"})
FLASH_SCORED = FlashScored("flash_attention_4_scored", "torch", _DATA_CENTRE_GPU, ScoredAttention, by=FLASH_4)
FLASH_SCORED_GRAD = FlashScored(
    "flash_attention_4_scored_grad", "torch", _DATA_CENTRE_GPU, ScoredAttentionGrad, deterministic=False, by=FLASH_4
)
