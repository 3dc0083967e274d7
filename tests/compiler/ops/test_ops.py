"""Every op: its Torch spelling against its reference in float64, its types against real tensors, its costs."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from specc.compiler import ops
from specc.compiler.catalog import classes
from specc.compiler.ir.graph import Builder, Op, TensorType
from specc.compiler.ops.additive import Additive
from specc.compiler.ops.attention import (
    CacheWrite,
    CausalAttention,
    CausalAttentionGrad,
    Exclusive,
    Sdpa,
    SdpaCached,
    SdpaSeen,
    SeenAttention,
    SeenAttentionGrad,
)
from specc.compiler.ops.documents import DocumentStarts, DocumentStartsKept
from specc.compiler.ops.dropout import Dropout
from specc.compiler.ops.hash import BigramHash
from specc.compiler.ops.int8_lstm import Int8LstmStep
from specc.compiler.ops.linear import Dgrad, Linear, Wgrad
from specc.compiler.ops.loss import CrossEntropy, SoftmaxLoss
from specc.compiler.ops.norm import LayerNorm, RmsNorm
from specc.compiler.ops.norm_rope import NormRope, NormRopeGrad
from specc.compiler.ops.pointwise import Pointwise, SumTo
from specc.compiler.ops.positions import Positions, Rope, RopeAngles, Sinusoid
from specc.compiler.ops.previous import KeepLast, Previous, PreviousKept, Reset
from specc.compiler.ops.quantized import Int8Linear, QuantizeRows
from specc.compiler.ops.recurrent import Lstm, LstmCell
from specc.compiler.ops.region import Call, Fused, Scan
from specc.compiler.ops.rounded import LstmGates, RoundRows
from specc.compiler.ops.sequence import AsStep, Concat, Copy, Repeat, Reversed, Seen, Shift, StateWrite, Zeros
from specc.compiler.ops.shape import (
    CropColumns,
    CropRows,
    Embedding,
    FirstFeatures,
    Halves,
    Last,
    MergeHeads,
    Moves,
    PadRows,
    Part,
    RowByRow,
    SplitHeads,
    TimeMajor,
)
from specc.compiler.programs import fx_witness as witness
from specc.compiler.render.jinja import exists, render
from specc.compiler.render.model import OpContext
from specc.runtime.dtypes import DTYPES
from specc.runtime.verify.judge import many

MODULES = itertools.count()
B, T, S = 3, 5, 9
SIZES = {"B": B, "T": T, "S": S}
X, IDS = "f32[B,T,8]", "i64[B,T]"
HEADS = "f32[B,T,4,6]"
SEEN = "bool[B,S]"
WEIGHTS = ("f32[12,8]", "f32[12,3]")  # of an LSTM of 3 features


@dataclass(frozen=True)
class Sample:
    """An op on inputs of some types; `ids` bounds what i64 inputs hold."""

    op: Op
    inputs: tuple[str, ...]
    ids: int = 7
    arithmetic: bool = False  # torch.fx finds arithmetic instead of one call


SAMPLES = [
    Sample(Linear(), (X, "f32[6,8]")),
    Sample(Linear(), ("f32[B,8]", "f32[6,8]")),
    Sample(Dgrad(), (X, "f32[8,6]"), arithmetic=True),
    Sample(Wgrad(), ("f32[T,8]", "f32[T,6]"), arithmetic=True),
    Sample(RmsNorm(), (X,)),
    Sample(RmsNorm(eps=0.5), (HEADS,)),
    Sample(RmsNorm(eps=1e-3, affine=True), (X, "f32[8]")),
    Sample(LayerNorm(), (X, "f32[8]", "f32[8]")),
    Sample(LayerNorm(eps=0.25), (X, "f32[8]", "f32[8]")),
    Sample(Sdpa(), (HEADS, HEADS, HEADS)),
    Sample(Sdpa(), (HEADS, "f32[B,T,2,6]", "f32[B,T,2,6]")),
    Sample(Sdpa(window=2), (HEADS, "f32[B,T,1,6]", "f32[B,T,1,6]")),
    Sample(Sdpa(window=50), (HEADS, HEADS, HEADS)),
    Sample(Sdpa(documents=True), (HEADS, "f32[B,T,2,6]", "f32[B,T,2,6]", IDS), ids=1),
    Sample(Sdpa(window=2, documents=True), (HEADS, "f32[B,T,1,6]", "f32[B,T,1,6]", IDS), ids=1),
    Sample(DocumentStarts(2), (IDS,), ids=3),
    Sample(DocumentStartsKept(2), (IDS, "i64[B,1]", "i64[]"), ids=3),
    Sample(SdpaCached(documents=True), (HEADS, "f32[B,S,2,6]", "f32[B,S,2,6]", "i64[T]", IDS), ids=1),
    Sample(SdpaCached(3, True), (HEADS, "f32[B,S,4,6]", "f32[B,S,4,6]", "i64[T]", IDS), ids=1),
    Sample(SdpaCached(), (HEADS, "f32[B,S,2,6]", "f32[B,S,2,6]", "i64[T]")),
    Sample(SdpaCached(window=3), (HEADS, "f32[B,S,4,6]", "f32[B,S,4,6]", "i64[T]")),
    Sample(CacheWrite(), ("f32[B,S,4,6]", HEADS, "i64[T]")),
    Sample(Positions(), (IDS,)),
    Sample(Positions(), (IDS, "i64[]")),
    Sample(RopeAngles(6, 100.0), ("i64[T]",)),
    Sample(RopeAngles(2, 10000.0), ("i64[T]",)),
    Sample(Rope(), (HEADS, "f32[T,3]", "f32[T,3]")),
    Sample(Rope(), (HEADS, "f32[T,1]", "f32[T,1]")),
    Sample(Embedding(), (IDS, "f32[7,8]")),
    Sample(SplitHeads(4), (X,)),
    Sample(MergeHeads(), (HEADS,)),
    Sample(Last(), (X,)),
    Sample(FirstFeatures(3), (X,)),
    Sample(FirstFeatures(8), (X,)),
    Sample(Halves(), (X,)),
    Sample(Exclusive(), (HEADS, HEADS)),
    Sample(Exclusive(), (HEADS, "f32[B,T,2,6]")),
    Sample(Exclusive(), (HEADS, "f32[B,T,1,6]")),
    Sample(Previous(), (X,)),
    Sample(Previous(-1), (IDS,)),
    Sample(Previous(), (HEADS,)),
    Sample(PreviousKept(), (X, "f32[B,1,8]", "i64[]"), ids=2),
    Sample(PreviousKept(-1), (IDS, "i64[B,1]", "i64[]"), ids=2),
    Sample(KeepLast(), ("f32[B,1,8]", X)),
    Sample(KeepLast(), ("i64[B,1]", IDS)),
    Sample(Reset(2), (X, IDS), ids=3),
    Sample(Reset(0, -1), (IDS, IDS), ids=3),
    Sample(Reset(1), (HEADS, IDS), ids=3),
    Sample(BigramHash(3072), (IDS, IDS), ids=2**31),
    Sample(BigramHash(2), (IDS, IDS)),
    Sample(PadRows(11), ("f32[7,8]",)),
    Sample(PadRows(7), ("f32[7,8]",)),
    Sample(CropRows(5), ("f32[7,8]",)),
    Sample(CrossEntropy("mean"), ("f32[B,T,7]", IDS)),
    Sample(CrossEntropy("none"), ("f32[B,T,7]", IDS)),
    Sample(Pointwise(("leaky_relu(x, 0.5) ** 2",), ("x",)), (X,), arithmetic=True),
    Sample(Pointwise(("silu(gate) * x",), ("x", "gate")), (X, X), arithmetic=True),
    Sample(Pointwise(("x + scale * branch",), ("x", "branch", "scale")), (X, X, "f32[8]"), arithmetic=True),
    Sample(Pointwise(("q * gain",), ("q", "gain")), (HEADS, "f32[4,1]"), arithmetic=True),
    Sample(Pointwise(("x * scale",), ("x", "scale")), (X, "f32[]"), arithmetic=True),
    Sample(Pointwise(("where(x > y, x - 1, abs(y))",), ("x", "y")), (X, X), arithmetic=True),
    Sample(Pointwise(("z",), ("z",), dtype="f32"), ("bf16[B,T,8]",), arithmetic=True),
    Sample(Pointwise(("3 * tanh(z / 3)",), ("z",), dtype="f32"), ("bf16[B,T,8]",), arithmetic=True),
    Sample(Pointwise(("x + 1", "max(x, y)"), ("x", "y"), ("y", "most")), (X, X), arithmetic=True),
    Sample(SdpaSeen(), (HEADS, "f32[B,S,2,6]", "f32[B,S,2,6]", SEEN)),
    Sample(Additive("relu"), ("f32[B,T,1]", "f32[B,S,1]", "f32[B,S,8]", SEEN)),
    Sample(Additive("tanh"), ("f32[B,T,6]", "f32[B,S,6]", "f32[B,S,8]", SEEN, "f32[6]")),
    Sample(Lstm(), (X, "f32[B,3]", "f32[B,3]", *WEIGHTS, "f32[12]")),
    Sample(Lstm(biases=2), (X, "f32[B,3]", "f32[B,3]", *WEIGHTS, "f32[12]", "f32[12]")),
    Sample(Lstm(2), (X, "f32[B,6]", "f32[B,6]", *WEIGHTS, "f32[12]", *WEIGHTS, "f32[12]")),
    Sample(Lstm(2, 2), (X, "f32[B,6]", "f32[B,6]", *(*WEIGHTS, "f32[12]", "f32[12]") * 2)),
    Sample(LstmCell(), ("f32[B,1,8]", "f32[B,3]", "f32[B,3]", *WEIGHTS, "f32[12]")),
    Sample(LstmCell(2), ("f32[B,1,8]", "f32[B,3]", "f32[B,3]", *WEIGHTS, "f32[12]", "f32[12]")),
    Sample(Seen(0), ("i64[B,S]",)),
    Sample(Shift(1), (IDS,)),
    Sample(Zeros((3, 2)), (X,)),
    Sample(StateWrite(), ("f32[B,8]", "f32[B,8]")),
    Sample(Copy(), (X,)),
    Sample(Concat(), (X, "f32[B,T,3]")),
    Sample(Reversed(), (X,)),
    Sample(AsStep(), ("f32[B,8]",)),
    Sample(Repeat(), ("f32[B,8]", IDS)),
    Sample(Dropout(0.5), (X,)),
    Sample(Sinusoid(6), ("i64[T]",)),
    Sample(CrossEntropy("mean", 0), ("f32[B,T,7]", IDS)),
    Sample(CrossEntropy("none", 0), ("f32[B,T,7]", IDS)),
    Sample(QuantizeRows(8), (X, "f32[8]")),
    Sample(QuantizeRows(16), (X, "f32[8]")),
    Sample(QuantizeRows(8, second=True), (X, "f32[8]")),
    Sample(QuantizeRows(16, second=True), (X, "f32[8]")),
    Sample(CropColumns(5), (X,)),
    Sample(RowByRow(), (X,)),
    Sample(TimeMajor(), (X,)),
    Sample(TimeMajor(backward=True), (X,)),
    Sample(TimeMajor(back=True), (X,)),
    Sample(Part(1, 2), (X,)),
    Sample(RoundRows(), (X, "f32[8]")),
    Sample(RoundRows(16), (X, "f32[8]")),
    Sample(LstmGates(), ("f32[B,12]", "f32[B,3]")),
    Sample(SumTo((8,)), (X,), arithmetic=True),
    Sample(SumTo((4, 1)), (HEADS,), arithmetic=True),
]  # fmt: skip
REGIONS = {Call.name, Fused.name, Scan.name}  # they run other graphs and have no arithmetic of their own
# only kernels compute them, in files of their own
KERNELS = {op.name for op in (SoftmaxLoss, NormRope, NormRopeGrad, CausalAttention, CausalAttentionGrad, Int8Linear)}
KERNELS |= {SeenAttention.name, SeenAttentionGrad.name, Int8LstmStep.name}


def named(sample: Sample) -> str:
    return f"{sample.op.name}{sample.op.settings()}({','.join(sample.inputs)})"


def types_of(sample: Sample) -> list[TensorType]:
    from specc.compiler.ir.text import parse_type

    return [parse_type(text) for text in sample.inputs]


def shape(type: TensorType) -> tuple[int, ...]:
    return tuple(SIZES[dim] if isinstance(dim, str) else dim for dim in type.shape)


def values(sample: Sample, seed: int) -> list[Tensor]:
    """Random inputs; positions are in order and inside the cache."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for type in types_of(sample):
        if type.dtype == "bool":
            found.append(torch.rand(shape(type), generator=generator) < 0.6)
            found[-1][:, 0] = True  # of a row without any there is no mean
        elif type.dtype == "i32":
            found.append(torch.randint(-99, 99, shape(type), generator=generator, dtype=torch.int32))
        elif type.dtype != "i64":
            found.append(torch.randn(shape(type), generator=generator, dtype=DTYPES[type.dtype]))
        elif type.shape == ("T",):
            found.append(torch.arange(T) + seed % (S - T))
        else:
            found.append(torch.randint(sample.ids, shape(type), generator=generator))
    return found


def module_of(sample: Sample) -> ModuleType:
    """A module with the support functions that the op calls and a function `f` of its spelling."""
    types = types_of(sample)
    names = [f"v{i}" for i in range(len(types))]
    lines = ["import torch", "from torch import Tensor, nn", "from torch.nn import functional as F", ""]
    lines.append(f"NAMESPACE = 'spelled_{next(MODULES)}'")  # for ops that it registers
    call = sample.op.call(types)
    if call is not None and (support := call.support):
        own = f"torch/ops/{support}.py.jinja"
        lines.append(
            render(own, OpContext(f"spelled_{next(MODULES)}"), "", "")
            if exists(own)
            else render(f"torch/{support}.py.jinja", None, "", "")
        )
    text = sample.op.torch(names, types)
    lines += ["class M(nn.Module):", f"    def forward(self, {', '.join(names)}):", f"        return {text}"]
    module = ModuleType("spelled")
    exec("\n".join(lines), vars(module))
    return module


def in_float64(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]


def test_every_op_has_a_sample() -> None:
    assert {sample.op.name for sample in SAMPLES} | REGIONS | KERNELS == set(classes(ops, Op))


@pytest.mark.parametrize("sample", SAMPLES, ids=named)
@pytest.mark.parametrize("seed", [0, 3])
def test_spelling_equals_the_reference(sample: Sample, seed: int) -> None:
    casts = isinstance(sample.op, Pointwise) and sample.op.dtype  # the text then names f32 itself
    given = values(sample, seed) if casts else in_float64(values(sample, seed))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(seed)  # for what draws
        found = many(module_of(sample).M()(*[tensor.clone() for tensor in given]))
    finally:
        torch.set_default_dtype(before)
    torch.manual_seed(seed)
    wanted = many(sample.op.reference(*in_float64(given)))
    assert len(found) == len(wanted)
    for have, want in zip(found, wanted, strict=True):
        exact = (torch.float64, torch.int32, torch.int64, torch.bool, torch.int8)
        assert want.dtype in exact
        tolerance = 1e-6 if casts else 1e-12
        torch.testing.assert_close(have.to(want.dtype), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sample", SAMPLES, ids=named)
def test_types_are_those_of_real_tensors(sample: Sample) -> None:
    found = many(module_of(sample).M()(*values(sample, 1)))
    wanted = sample.op.infer(types_of(sample))
    assert [tuple(tensor.shape) for tensor in found] == [shape(type) for type in wanted]
    assert [tensor.dtype for tensor in found] == [DTYPES[type.dtype] for type in wanted]


@pytest.mark.parametrize("sample", [s for s in SAMPLES if not isinstance(s.op, Dgrad | Wgrad | SumTo)], ids=named)
def test_torch_fx_finds_what_the_op_says(sample: Sample) -> None:
    if isinstance(sample.op, Pointwise) and len(sample.op.outputs) > 1:
        sample = replace(sample, op=replace(sample.op, outputs=sample.op.outputs[:1], labels=()))
    module = module_of(sample)
    graph = graph_of(sample)
    if len(sample.op.infer(types_of(sample))) > 1:
        text = f"class N(M):\n    def forward(self, {', '.join(n for n, _ in graph.inputs)}):\n"
        exec(f"{text}        return M.forward(self, {', '.join(n for n, _ in graph.inputs)})[0]", vars(module))
    traced = witness.trace(vars(module).get("N", module.M)(), module, "forward")
    assert witness.compare(graph, {}, traced).keys() == {"n"}
    changed = different(sample)
    if changed is not None:
        with pytest.raises(witness.Mismatch, match=r"^n "):
            witness.compare(graph_of(changed), {}, traced)


def graph_of(sample: Sample):  # type: ignore[no-untyped-def]
    b = Builder("g")
    names = [b.input(f"v{i}", type) for i, type in enumerate(types_of(sample))]
    return b.build({"y": b.add("n", sample.op, names)})


def different(sample: Sample) -> Sample | None:
    """The same op with one setting changed, where it has one that leaves its types alone."""
    changes: dict[type[Op], dict[str, object]] = {
        RmsNorm: {"eps": 0.125},
        LayerNorm: {"eps": 0.125},
        RopeAngles: {"base": 77.0},
        Seen: {"pad": 3},
        Shift: {"start": 2},
        Dropout: {"p": 0.25},
        Zeros: {"shape": (2, 3)},
        Previous: {"fill": 5},
        PreviousKept: {"fill": 5},
        Reset: {"token": 4},
        BigramHash: {"buckets": 77},
    }
    if isinstance(sample.op, Sdpa | SdpaCached):
        return replace(sample, op=replace(sample.op, window=(sample.op.window or 0) + 1))
    if isinstance(sample.op, Pointwise):
        text = sample.op.outputs[0]
        return replace(sample, op=replace(sample.op, outputs=(f"({text}) + 1",)))
    change = changes.get(type(sample.op))
    return replace(sample, op=replace(sample.op, **change)) if change else None  # type: ignore[arg-type]


PRODUCTS = [sample for sample in SAMPLES if isinstance(sample.op, Linear | Dgrad | Wgrad)]


@pytest.mark.parametrize("sample", PRODUCTS, ids=named)
def test_flops_of_products_are_torchs_count(sample: Sample) -> None:
    types = types_of(sample)
    given = values(sample, 0)
    with FlopCounterMode(display=False) as counter:
        module_of(sample).M()(*given)
    assert sample.op.flops(types, sample.op.infer(types), SIZES) == counter.get_total_flops() > 0


@pytest.mark.parametrize("window", [None, 1, 2, 5, 9])
def test_flops_of_attention_count_the_pairs_that_see_each_other(window: int | None) -> None:
    type = TensorType(("B", "T", 4, 6), "f32")
    pairs = sum(0 <= row - column < (window or T) for row in range(T) for column in range(T))
    assert Sdpa(window).flops([type] * 3, [type], SIZES) == 4 * B * 4 * 6 * pairs


@pytest.mark.parametrize("sample", SAMPLES, ids=named)
def test_flops_grow_in_proportion_to_the_rows(sample: Sample) -> None:
    types = types_of(sample)
    one, three = (sample.op.flops(types, sample.op.infer(types), {**SIZES, "B": rows}) for rows in (1, 3))
    rowless = not any("B" in type.shape for type in types) or isinstance(sample.op, Positions)
    assert three == (one if rowless else 3 * one)
    moves = (Embedding, SplitHeads, MergeHeads, Last, FirstFeatures, PadRows, CropRows, CacheWrite, Positions, Moves)
    moves += (DocumentStarts, DocumentStartsKept, Halves, Previous, PreviousKept, KeepLast, Reset, BigramHash)
    assert (one == 0) == isinstance(sample.op, moves)
