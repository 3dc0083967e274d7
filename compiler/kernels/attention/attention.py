"""Causal attention and its gradient, by kernels of cuDNN, Torch's flash attention, or flash-attn-4."""

from dataclasses import replace
from typing import NamedTuple

from specc.compiler.expr.mask import CAUSAL
from specc.compiler.expr.score import PLAIN
from specc.compiler.ir.types import DTYPES, TensorType
from specc.compiler.kernels.generated import GeneratedFunction, generated_function, number_of, python_file
from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.ops.attention import ScoreFields
from specc.compiler.ops.saved_attention import CausalAttention, CausalAttentionGrad, SavedAttentionGrad, SeenOp
from specc.compiler.records import record

FORWARD, BACKWARD = ("q", "k", "v"), ("dy", "q", "k", "v", "y", "lse")
VALUES = frozenset({"v", "y", "dy", "dv"})  # the tensors whose heads have the number of channels of v
REPEATS = {
    True: "Called again, it gives the same bits.",
    False: "Called again, it may give other bits: blocks of keys add to dq in the order in which they end.",
}


class Library(NamedTuple):
    """A third-party attention kernel.

    Attributes:
        name: The library's usual name.
        call: The name prefix of the macros that call the library. The macros are in
            templates/torch/attention_calls.jinja.
        widest: The largest number of channels per head.
        step: The number of channels per head must be a multiple of this number.
        home: Features of GPUs. On a GPU with one of these features, the compiler prefers this library, as Torch does.
        extra: Whether the library is installed separately, not as a part of Torch.
        unequal: Whether keys and values may differ in the number of channels per head.
    """

    name: str
    call: str
    widest: int
    step: int = 8  # 16 bytes of bf16, one vector load
    home: frozenset[str] = frozenset()
    extra: bool = False
    unequal: bool = False


DATA_CENTRE = frozenset({"wgmma", "tcgen05"})
CUDNN = Library("cuDNN", "cudnn", 128, home=DATA_CENTRE, unequal=True)
FLASH = Library("Torch's flash attention", "flash", 256)
# Torch's dispatch rejects heads with REFUSED channels for training on sm86, sm89 and sm120. A block on these GPUs has
# less than ROOM bytes of shared memory.
REFUSED, ROOM = range(193, 225), 131_072
# With 8 channels per head, flash-attn-4 4.0.0b36 computes a wrong dq on an H200 and reports no error. With 64 and 128
# channels, dq is correct.
FLASH_4_CALLS = {False: "_flash_attn_fwd", True: "_flash_attn_bwd"}
FLASH_4 = Library("flash-attn-4", "flash_4", 128, 64, extra=True)


class AttentionContext(NamedTuple):
    """The context of templates/torch/attention.py.jinja.

    Attributes:
        repeats: A sentence that states whether repeated calls return the same bits.
        imports: The statements that import flash-attn-4. Empty for other libraries.
        wanted: The input checks of the generated function. Each check states an input's name, required shape and
            required dtype.
        call: The name of the macro in attention_calls.jinja that calls the library.
        ordered: Whether sums must have a fixed order, so that repeated calls return the same bits.
    """

    op: GeneratedFunction
    repeats: str
    imports: tuple[str, ...]
    heads: int
    kv_heads: int
    channels: int
    wanted: tuple[str, ...]
    call: str
    ordered: bool
    fake: str


@record
class AttentionKernel(Kernel):
    """A forward or backward attention kernel of a third-party library. The kernel accepts 16-bit values, and the head
    sizes that the library supports."""

    by: Library = CUDNN

    def rejects(self, site: Site) -> str | None:
        q = site.inputs[is_gradient(site)]
        channels = number_of(q.width)
        if q.dtype not in ("bf16", "f16"):
            return f"computes in bf16 or f16, not in {q.dtype}"
        if not self.by.unequal and (reason := unequal(site)):
            return reason
        if channels % self.by.step or channels > self.by.widest:
            bounds = f"a multiple of {self.by.step} channels, at most {self.by.widest}"
            return f"takes heads of {bounds}; these have {channels}"
        return None

    def rank(self, site: Site) -> int:
        if self.by.extra:  # a kernel of an optional package is never the default, but tuning may select it
            return 8 + self.deterministic
        return 1 if self.by.home & site.target.features else 2 + bool(self.by.home)

    def call(self, direction: str) -> str:
        return f"{self.by.call}_{direction}"

    @property
    def made_of(self) -> str:
        return self.by.name

    def workspace(self, site: Site) -> tuple[TensorType, ...]:
        q = inputs_of(site)["q"]
        # The f32 buffer in which the gradient of q is summed
        return (replace(q, dtype="f32"),) if is_gradient(site) else ()

    @property
    def package(self) -> str:
        return self.by.name if self.by.extra else ""

    def render(self, site: Site) -> Rendered:
        inputs, backward = inputs_of(site), is_gradient(site)
        q, k = inputs["q"], inputs["k"]
        direction = "backward" if backward else "forward"
        op = attention_function(site, f"{site.node.op.words} by {self.by.name}")
        context = AttentionContext(
            op=op,
            repeats=REPEATS[self.deterministic],
            imports=(f"from flash_attn.cute.interface import {FLASH_4_CALLS[backward]}",) if self.by.extra else (),
            heads=number_of(q.shape[-2]),
            kv_heads=number_of(k.shape[-2]),
            channels=number_of(q.width),
            wanted=tuple(input_check(name, type, q) for name, type in inputs.items()),
            call=self.call(direction),
            ordered=self.deterministic,
            fake=fake_outputs(site),
        )
        return python_file(op, "torch/attention.py.jinja", context)


class FlashBackward(AttentionKernel):
    """The gradient by Torch's flash attention. On GPUs with little shared memory, Torch does not support heads of 193
    to 224 channels."""

    def rejects(self, site: Site) -> str | None:
        channels = number_of(inputs_of(site)["q"].width)
        if channels in REFUSED and site.target.shared_memory < ROOM:
            heads = f"heads of {REFUSED.start} to {REFUSED.stop - 1} channels; these have {channels}"
            return f"cannot compute the gradient on {site.target.title} for {heads}"
        return AttentionKernel.rejects(self, site)


class OrderedFlashBackward(FlashBackward):
    """The gradient by Torch's flash attention with sums in a fixed order. A fixed order is slower than an arbitrary
    order."""

    def rank(self, site: Site) -> int:
        return 4 + FlashBackward.rank(self, site)  # after the kernels whose summation order may vary

    def call(self, direction: str) -> str:
        return f"{self.by.call}_ordered_{direction}"


class OrderedBackward(AttentionKernel):
    """The gradient by flash-attn-4 with sums in a fixed order. flash-attn-4 supports a fixed order only on data-center
    GPUs."""

    def rejects(self, site: Site) -> str | None:
        if not DATA_CENTRE & site.target.features:
            return f"supports sums in a fixed order only on H100, H200 and B200, not on {site.target.title}"
        return AttentionKernel.rejects(self, site)


_GPU, _HOPPER = frozenset({"gpu", "mma"}), frozenset({"tma"})
_FORWARD, _GRAD = CausalAttention, CausalAttentionGrad
CUDNN_FORWARD = AttentionKernel("cudnn_attention", "torch", _GPU, _FORWARD, by=CUDNN)
CUDNN_BACKWARD = AttentionKernel("cudnn_attention_grad", "torch", _GPU, _GRAD, deterministic=False, by=CUDNN)
FLASH_FORWARD = AttentionKernel("flash_attention", "torch", _GPU, _FORWARD, by=FLASH)
FLASH_BACKWARD = FlashBackward("flash_attention_grad", "torch", _GPU, _GRAD, deterministic=False, by=FLASH)
FLASH_ORDERED_BACKWARD = OrderedFlashBackward("flash_attention_grad_ordered", "torch", _GPU, _GRAD, by=FLASH)
FLASH_4_FORWARD = AttentionKernel("flash_attention_4", "torch", _HOPPER, _FORWARD, by=FLASH_4)
FLASH_4_BACKWARD = AttentionKernel("flash_attention_4_grad", "torch", _HOPPER, _GRAD, deterministic=False, by=FLASH_4)
FLASH_4_ORDERED = OrderedBackward("flash_attention_4_grad_ordered", "torch", _HOPPER, _GRAD, by=FLASH_4)


def fake_outputs(site: Site) -> str:
    """Returns the outputs of a custom op's fake implementation, as Python text. The outputs are tensors without values,
    because Torch's tracing needs only shapes and dtypes."""
    if is_gradient(site):
        return "q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)"
    y = "q.shape" if unequal(site) is None else f"*q.shape[:3], {inputs_of(site)['v'].width}"
    return f"q.new_empty({y}), q.new_empty(q.shape[0], H, q.shape[1], dtype=torch.float32)"


def is_gradient(site: Site) -> bool:
    return isinstance(site.node.op, SavedAttentionGrad)


def heads_refusal(q: TensorType, widest: int) -> str | None:
    """Returns the reason to reject queries that are not 16-bit floats, or that have more than `widest` channels per
    head. Returns None for all other queries."""
    if q.dtype not in ("bf16", "f16"):
        return f"computes in bf16 or f16, not in {q.dtype}"
    return f"takes heads of at most {widest} channels; these have {q.width}" if number_of(q.width) > widest else None


def unequal(site: Site) -> str | None:
    """Returns a reason to reject the site if values and keys differ in the number of channels, otherwise None."""
    inputs = inputs_of(site)
    keys, values = inputs["k"].width, inputs["v"].width
    return None if keys == values else f"takes values with as many channels as keys; these have {values} and {keys}"


def table_name(name: str) -> str:
    """Returns the name of a learned table in generated code. The suffix `_table` distinguishes the table from other
    variables of the code. The names `start` and `sinks` have no suffix."""
    return name if name in ("start", "sinks") else f"{name}_table"


def inputs_of(site: Site) -> dict[str, TensorType]:
    """Returns the types of the site's inputs, by the names of the inputs in generated code."""
    op = site.node.op
    further = map(table_name, op.further) if isinstance(op, ScoreFields) else ("seen",)
    names = (*(BACKWARD if is_gradient(site) else FORWARD), *further)
    return dict(zip(names, site.inputs, strict=False))


def attention_function(site: Site, summary: str) -> GeneratedFunction:
    """Returns the description of the generated function. `summary` becomes part of the function's docstring."""
    inputs = inputs_of(site)
    outputs = dict(zip(site.node.op.output_labels, site.node.types, strict=True))
    dims = {name: _dims(name, inputs["q"], inputs["k"], inputs["v"]) for name in (*inputs, *outputs)}
    further = site.node.op.further if isinstance(site.node.op, ScoreFields) else ()
    for name in further:
        dims[table_name(name)] = tuple(map(str, inputs[table_name(name)].shape))
        if f"d{name}" in dims:
            dims[f"d{name}"] = dims[table_name(name)]
    shapes = {name: f"[{', '.join(shape)}]" for name, shape in dims.items()}
    return generated_function(site, inputs, outputs, shapes, f"{site.label}: {summary}.", _formulas(site))


def _formulas(site: Site) -> list[str]:
    op, backward, inputs = site.node.op, is_gradient(site), inputs_of(site)
    shared = number_of(inputs["q"].shape[-2]) // number_of(inputs["k"].shape[-2])
    scored = op if isinstance(op, ScoreFields) else ScoreFields()
    scale = f"/ {number_of(inputs['q'].width)} ** 0.5" if scored.scale is None else f"* {scored.scale:g}"
    keys = "that are seen" if isinstance(op, SeenOp) else "up to a query's own token"
    keys = f"where {scored.mask}" if scored.mask != CAUSAL else keys
    lines = [f"s = q k^T {scale} for the keys {keys}" if scored.mask == CAUSAL else f"s = q k^T {scale} {keys}"]
    value = "s" if scored.score == PLAIN else "score"
    lines += [f"score = {scored.score}"] if value == "score" else []
    ds = "(dscore * dscore / ds)" if value == "score" else "ds"
    if backward:
        lines += [f"p = exp({value} - lse), dv = p^T dy", f"d{value} = p * (dy v^T - sum(dy * y))"]
        lines += [f"dq = {ds} k {scale}, dk = {ds}^T q {scale}"]
        lines += [
            f"d{name} sums dscore * dscore / d{name} over the scores that read an element" for name in scored.tables
        ]
        lines += ["dsinks = -sum(exp(sinks - lse) * sum(dy * y))"] if scored.sinks else []
    else:
        sinks = " + exp(sinks)" if scored.sinks else ""
        lines += [f"lse = log(sum(exp({value})){sinks}), y = exp({value} - lse) v"]
    lines += [f"{shared} heads of queries read one of keys and values"] if shared > 1 else []
    lines += ["A query that sees no key gives 0"] if isinstance(op, SeenOp) and not backward else []
    return lines


def _dims(name: str, q: TensorType, k: TensorType, v: TensorType) -> tuple[str, ...]:
    heads, kv_heads, channels = q.shape[-2], k.shape[-2], (v if name in VALUES else q).width
    keys = "T" if q.shape[1] == k.shape[1] else "S"
    if name == "lse":
        return "B", str(heads), "T"
    if name == "seen":
        return "B", keys
    shared = name.lstrip("d") in ("k", "v")
    return "B", keys if shared else "T", str(kv_heads if shared else heads), str(channels)


def input_check(name: str, type: TensorType, q: TensorType, sees: bool = False) -> str:
    """Returns an input check of the generated function: the input's name, required shape and required dtype.

    Args:
        name: The name of the input.
        type: The type of the input.
        q: The type of the queries.
        sees: Whether the op has a padding mask. The number of keys S may then differ from the number of queries T.
    """
    keys, channels = "s" if sees else "t", "C" if type.width == q.width else str(type.width)
    shapes = {"lse": "(b, H, t)", "seen": "(b, s)", "k": f"(b, {keys}, G, C)", "v": f"(b, {keys}, G, {channels})"}
    return f'("{name}", {name}, {shapes.get(name, f"(b, t, H, {channels})")}, {DTYPES[type.dtype]}),'
