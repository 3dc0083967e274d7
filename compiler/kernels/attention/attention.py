"""Causal attention and its gradient by library kernels: cuDNN, Torch's flash attention, and flash-attn-4."""

from dataclasses import dataclass
from typing import ClassVar

from specc.compiler.ir.graph import Op, TensorType
from specc.compiler.kernels.custom_op import DTYPES
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, symbol
from specc.compiler.kernels.lines import flowed, listed, unbroken
from specc.compiler.ops.attention import CausalAttention, CausalAttentionGrad
from specc.compiler.ops.attention_seen import SeenAttentionGrad, SeenOp

FORWARD, BACKWARD = ("q", "k", "v"), ("dy", "q", "k", "v", "y", "lse")
REPEATS = {
    True: "Called again, it gives the same bits.",
    False: "Called again, it may give other bits: blocks of keys add to dq in the order in which they end.",
}
FAKES = {
    False: "q.new_empty(q.shape), q.new_empty(q.shape[0], H, q.shape[1], dtype=torch.float32)",
    True: "q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)",
}


@dataclass(frozen=True, slots=True)
class Library:
    """A third-party attention kernel.

    Attributes:
        name: The library's usual name.
        call: The part of the templates' names that identifies the library.
        widest: The maximum number of channels per head.
        step: The number of channels per head must be a multiple of this.
        imports: The template of extra import lines, or "".
        home: Target features for which the library is preferred, as Torch's own dispatch does.
        extra: Whether the library is a package that Torch does not include.
    """

    name: str
    call: str
    widest: int
    step: int = 8  # 16 bytes of bf16, one vector load
    imports: str = ""
    home: frozenset[str] = frozenset()
    extra: bool = False


DATA_CENTRE = frozenset({"wgmma", "tcgen05"})
CUDNN = Library("cuDNN", "cudnn", 128, home=DATA_CENTRE)
FLASH = Library("Torch's flash attention", "flash", 256)
# Torch's dispatch rejects these for training on sm86, sm89 and sm120, which have less shared memory per block.
REFUSED, ROOM = range(193, 225), 131_072
# With 8 channels, its dq is wrong on an H200 (4.0.0b36), without an error. With 64 and 128 it was observed to be right.
FLASH_4 = Library("flash-attn-4", "flash_4", 128, 64, "torch/attention_flash_4_import.py.jinja", extra=True)


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """The context of templates/torch/attention.py.jinja.

    Attributes:
        repeats: A sentence on whether repeated calls return the same bits.
        imports: The template of extra import lines, or "".
        imported: The name that these lines import.
        wanted: Rows of the table of input checks.
        body: The template of the library call.
        ordered: Whether sums must have a fixed order.
    """

    TEMPLATE: ClassVar[str] = "torch/attention.py.jinja"
    header: str
    summary: str
    formulas: tuple[str, ...]
    repeats: str
    imports: str
    imported: str
    namespace: str
    node: str
    function: str
    symbol: str
    heads: int
    kv_heads: int
    channels: int
    signature: str
    promise: str
    wanted: tuple[str, ...]
    body: str
    ordered: bool
    fake_signature: str
    fake: str


@dataclass(frozen=True, slots=True)
class AttentionKernel(Kernel):
    """A library's kernel for one direction, forward or backward. It accepts 16-bit heads of certain sizes."""

    by: Library = CUDNN

    def rejects(self, site: Site) -> str | None:
        q = heads_of(site)[1]["q"]
        channels = q.width
        assert isinstance(channels, int)
        if q.dtype not in ("bf16", "f16"):
            return f"computes in bf16 or f16, not in {q.dtype}"
        if channels % self.by.step or channels > self.by.widest:
            return (
                f"takes heads of a multiple of {self.by.step} channels, at most {self.by.widest}; these have {channels}"
            )
        return None

    def rank(self, site: Site) -> int:
        if self.by.extra:  # an optional package is never the default, but may be measured to be fastest
            return 8 + self.deterministic
        return 1 if self.by.home & site.target.features else 2 + bool(self.by.home)

    @property
    def made_of(self) -> str:
        return self.by.name

    @property
    def package(self) -> str:
        return self.by.name if self.by.extra else ""

    def render(self, site: Site) -> Rendered:
        function, module = symbol(site)
        context = _context(site, self)
        return Rendered(function, module, {f"{module}.py": (context.TEMPLATE, context)}, "")


@dataclass(frozen=True, slots=True)
class AttentionForward(AttentionKernel):
    computes: ClassVar[type[Op]] = CausalAttention


@dataclass(frozen=True, slots=True)
class AttentionBackward(AttentionKernel):
    computes: ClassVar[type[Op]] = CausalAttentionGrad


@dataclass(frozen=True, slots=True)
class FlashBackward(AttentionBackward):
    """The gradient by Torch's flash attention, which lacks some head sizes on GPUs with little shared memory."""

    def rejects(self, site: Site) -> str | None:
        channels = number_of(heads_of(site)[1]["q"].width)
        if channels in REFUSED and site.target.shared_memory < ROOM:
            heads = f"heads of {REFUSED.start} to {REFUSED.stop - 1} channels; these have {channels}"
            return f"has no gradient on {site.target.title} of {heads}"
        return AttentionKernel.rejects(self, site)


@dataclass(frozen=True, slots=True)
class OrderedBackward(AttentionBackward):
    """The gradient by flash-attn-4 with sums in a fixed order, which it supports only on data-centre GPUs."""

    def rejects(self, site: Site) -> str | None:
        if not DATA_CENTRE & site.target.features:
            return f"adds up in a fixed order on H100, H200 and B200, and not on {site.target.title}"
        return AttentionKernel.rejects(self, site)


_GPU, _HOPPER = frozenset({"gpu", "mma"}), frozenset({"tma"})
CUDNN_FORWARD = AttentionForward("cudnn_attention", "torch", _GPU, by=CUDNN)
CUDNN_BACKWARD = AttentionBackward("cudnn_attention_grad", "torch", _GPU, deterministic=False, by=CUDNN)
FLASH_FORWARD = AttentionForward("flash_attention", "torch", _GPU, by=FLASH)
FLASH_BACKWARD = FlashBackward("flash_attention_grad", "torch", _GPU, deterministic=False, by=FLASH)
FLASH_4_FORWARD = AttentionForward("flash_attention_4", "torch", _HOPPER, by=FLASH_4)
FLASH_4_BACKWARD = AttentionBackward("flash_attention_4_grad", "torch", _HOPPER, deterministic=False, by=FLASH_4)
FLASH_4_ORDERED = OrderedBackward("flash_attention_4_grad_ordered", "torch", _HOPPER, by=FLASH_4)


def heads_of(site: Site) -> tuple[bool, dict[str, TensorType], dict[str, TensorType]]:
    """Returns whether a site is the gradient, and its inputs and outputs by their names in generated code."""
    backward = isinstance(site.node.op, CausalAttentionGrad | SeenAttentionGrad)
    names = (*(BACKWARD if backward else FORWARD), *(("seen",) if isinstance(site.node.op, SeenOp) else ()))
    outputs = dict(zip(site.node.op.output_labels, site.node.types, strict=True))
    return backward, dict(zip(names, site.inputs, strict=True)), outputs


def header(site: Site) -> str:
    """Returns label and types as comment lines that leave room for the plan key after the last one."""
    _, inputs, outputs = heads_of(site)
    given, results = (
        ", ".join(unbroken(f"{name} {type}") for name, type in values.items()) for values in (inputs, outputs)
    )
    return flowed(f"{unbroken(f'{site.label}    ')}{given} -> {results}", "# ", "    ", 88)


def promise(site: Site) -> str:
    """Returns the first sentence of the function's docstring, with opening quotes."""
    _, inputs, outputs = heads_of(site)
    given, results = (
        ", ".join(f"{name} [{', '.join(_dims(name, inputs['q'], inputs['k']))}] {type.dtype}" for name, type in values)
        for values in (inputs.items(), outputs.items())
    )
    return flowed(f'"""{given} -> {results}.', "    ")


def formulas(site: Site) -> tuple[str, ...]:
    """Returns the formulas, one line per value, as lines of a docstring."""
    backward, inputs, _ = heads_of(site)
    shared = number_of(inputs["q"].shape[-2]) // number_of(inputs["k"].shape[-2])
    root = f"{number_of(inputs['q'].width)} ** 0.5"
    keys = "that are seen" if isinstance(site.node.op, SeenOp) else "up to a query's own token"
    lines = [f"s = q k^T / {root} for the keys {keys}"]
    if backward:
        lines += ["p = exp(s - lse), dv = p^T dy", "ds = p * (dy v^T - sum(dy * y))"]
        lines += [f"dq = ds k / {root}, dk = ds^T q / {root}"]
    else:
        lines += ["lse = log(sum(exp(s))), y = exp(s - lse) v"]
    lines += [f"{shared} heads of queries read one of keys and values"] if shared > 1 else []
    lines += ["A query that sees no key gives 0"] if isinstance(site.node.op, SeenOp) and not backward else []
    return tuple(flowed(line, "    ", "    ") for line in lines)


def annotation(site: Site) -> str:
    """Returns the function's return annotation."""
    return f"tuple[{', '.join('Tensor' for _ in site.node.types)}]"


def number_of(dim: object) -> int:
    assert isinstance(dim, int)
    return dim


def _dims(name: str, q: TensorType, k: TensorType) -> tuple[str, ...]:
    """Returns the dims of a tensor as text for a docstring."""
    heads, kv_heads, channels = q.shape[-2], k.shape[-2], q.width
    keys = "T" if q.shape[1] == k.shape[1] else "S"
    if name == "lse":
        return "B", str(heads), "T"
    if name == "seen":
        return "B", keys
    shared = name.lstrip("d") in ("k", "v")
    return "B", keys if shared else "T", str(kv_heads if shared else heads), str(channels)


def _context(site: Site, kernel: AttentionKernel) -> AttentionContext:
    function, module = symbol(site)
    backward, inputs, _ = heads_of(site)
    q, k = inputs["q"], inputs["k"]
    arguments = [f"{name}: Tensor" for name in inputs]
    direction = "backward" if backward else "forward"
    return AttentionContext(
        header=header(site),
        summary=flowed(f'"""{site.label}: {site.node.op.words} by {kernel.by.name}.'),
        formulas=formulas(site),
        repeats=REPEATS[kernel.deterministic],
        imports=kernel.by.imports,
        imported="_flash_attn_bwd" if backward else "_flash_attn_fwd",
        namespace=f"specc_{site.module}",
        node=site.label,
        function=function,
        symbol=module,
        heads=number_of(q.shape[-2]),
        kv_heads=number_of(k.shape[-2]),
        channels=number_of(q.width),
        signature=listed(f"def {function}(", arguments, f") -> {annotation(site)}:"),
        promise=promise(site),
        wanted=tuple(_wanted(name, type) for name, type in inputs.items()),
        body=f"torch/attention_{kernel.by.call}_{direction}.py.jinja",
        ordered=kernel.deterministic,
        fake_signature=listed("def _(", arguments, f") -> {annotation(site)}:"),
        fake=FAKES[backward],
    )


def _wanted(name: str, type: TensorType) -> str:
    """Returns a row of the table of input checks: an input with the shape and dtype that it must have."""
    heads = "G" if name in ("k", "v") else "H"
    shape = "(b, H, t)" if name == "lse" else f"(b, t, {heads}, C)"
    return f'("{name}", {name}, {shape}, {DTYPES[type.dtype]}),'
